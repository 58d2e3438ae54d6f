"""The five layouts are one algorithm: they start alike, and differ in what they hold and what they train."""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lit_rlkv.config.schema import KLConfig, RewardConfig
from lit_rlkv.experience.advantages import GAEAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.layouts import LAYOUTS, ROLES
from lit_rlkv.modules.ppo import PPO
from tests.hand_built import TRAINED_HEAD, make_datamodule, make_model, make_ppo, make_roles, train_here

STEP_METRICS = ("loss", "policy_loss", "value_loss", "entropy", "value/mean")


@dataclass(frozen=True)
class Run:
    """Two iterations of PPO on the same seed and data, the first of them at the start of every role."""

    module: PPO
    experiences: list[Experience]
    metrics: list[dict[str, float]]


@cache
def run(layout: str, seed: int = 0) -> Run:
    module = make_ppo(make_roles(layout, ROLES, seed=seed))
    data = make_datamodule(
        module.roles,
        advantage=GAEAdvantage(1.0, 0.95),
        kl=KLConfig(weight=0.1, place="reward", estimator="k1"),
        reward=RewardConfig(verifier=0.5, learned=0.5),
        aggregation="token",
        learner_parts=module.learner_parts,
    )
    experiences: list[Experience] = []
    data.callbacks = [SimpleNamespace(on_rollout_end=experiences.append)]
    return Run(module, experiences, train_here(module, data, 2).rows)


def scores_of(experience: Experience) -> dict[str, Tensor]:
    scores = {"rewards": experience.rewards.total, "learned": experience.rewards.components["learned"]}
    return scores | {"values": experience.values, "ref_logps": experience.ref_logps}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_start_with_the_same_rollout_scores_and_losses(layout: str):
    first, hydra = run(layout).experiences[0], run("hydra").experiences[0]
    assert torch.equal(first.rollout.input_ids, hydra.rollout.input_ids)
    assert torch.equal(first.rollout.evicted_at, hydra.rollout.evicted_at)
    for name, expected in scores_of(hydra).items():
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(scores_of(first)[name], expected, rtol=1e-6, atol=1e-6)
    found, expected = (
        {name: row.metrics[0][name] for name in STEP_METRICS} for row in (run(layout), run("hydra"))
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_comparison_catches_another_start():
    first, other = run("hydra").experiences[0], run("hydra", seed=1).experiences[0]
    assert not torch.equal(first.rollout.input_ids, other.rollout.input_ids)
    assert abs(run("hydra").metrics[0]["value_loss"] - run("hydra", seed=1).metrics[0]["value_loss"]) > 1e-2


@pytest.mark.parametrize(("layout", "other"), [("j_hydra", "hydra"), ("ppo", "hydra"), ("ppo", "j_hydra")])
def test_layouts_differ_after_the_first_update(layout: str, other: str):
    found, expected = run(layout).experiences[1], run(other).experiences[1]
    assert (found.values - expected.values).abs().max() > 1e-2
    assert abs(run(layout).metrics[1]["value_loss"] - run(other).metrics[1]["value_loss"]) > 1e-2


@pytest.mark.parametrize("layout", ["lora_ppo", "dynamic_lora"])
def test_layouts_with_the_same_adapters_stay_the_same_training(layout: str):
    """Hydra-RLHF saves memory and forwards, and gives up nothing: the paper's claim, to float error."""
    second, hydra = run(layout).experiences[1], run("hydra").experiences[1]
    assert torch.equal(second.rollout.input_ids, hydra.rollout.input_ids)
    for name, expected in scores_of(hydra).items():
        torch.testing.assert_close(scores_of(second)[name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "n_backbones"),
    [("ppo", 4), ("lora_ppo", 4), ("dynamic_lora", 2), ("j_hydra", 1), ("hydra", 1)],
)
def test_a_layout_holds_its_backbones_once_and_no_copy_after_training(layout: str, n_backbones: int):
    module = run(layout).module
    tensors = [*module.parameters(), *module.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    model = make_model()
    own = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in [*model.parameters(), *model.buffers()]
    }
    extras = [p for name, p in module.named_parameters() if "lora_" in name or ".heads." in f".{name}"]
    assert len(module.roles.backbones) == n_backbones
    assert sum(storages.values()) - sum(p.nbytes for p in extras) == n_backbones * sum(own.values())
    assert len(storages) == len(extras) + n_backbones * len(own)


@pytest.mark.parametrize(
    ("layout", "trains"),
    [
        ("lora_ppo", {"backbones.policy lora policy", "backbones.value lora value", "heads.value"}),
        ("dynamic_lora", {"backbones.actor lora policy", "backbones.critic lora value", "heads.value"}),
        ("hydra", {"backbones.shared lora policy", "backbones.shared lora value", "heads.value"}),
        ("j_hydra", {"backbones.shared lora joint", "heads.value"}),
        ("ppo", {"backbones.policy", "backbones.value", "heads.value"}),
    ],
)
def test_only_trained_parameters_have_gradients_and_change(layout: str, trains: set[str]):
    roles, start = run(layout).module.roles, dict(make_roles(layout, ROLES).named_parameters())

    def group_of(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:2]) + (f" lora {parts[-2]}" if "lora_" in name else "")

    learns = {name for name, p in roles.named_parameters() if p.requires_grad}
    moved = {name for name, p in roles.named_parameters() if not torch.equal(p, start[name])}
    assert {group_of(name) for name in learns} == trains
    assert {group_of(name) for name in moved} == trains
    assert moved <= learns
    assert torch.equal(roles.head("reward").linear.weight, TRAINED_HEAD["linear.weight"])
