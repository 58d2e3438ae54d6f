"""PPO against its formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.config.schema import KLConfig, RolesConfig
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import ROLES
from tests.hand_built import (
    ARMS,
    counted_forwards,
    gradients_of,
    make_ppo,
    make_roles,
    shift,
    tokens_of,
    train_here,
)
from tests.modules.ppo_by_definition import (
    BOTH,
    PAID,
    credit_by_definition,
    losses_by_definition,
    make_data,
    roll_out,
    seen_by,
    step,
)
from tests.modules.test_grpo import weights_by_definition


@pytest.mark.parametrize("arm", ARMS)
def test_advantages_returns_and_losses_equal_their_definition(arm: str):
    roles, data, experience = roll_out(arm=arm)
    (batch,) = data.splitter.minibatches(experience)
    assert torch.equal(
        batch.rollout.input_ids.sort(dim=0).values, experience.rollout.input_ids.sort(dim=0).values
    )
    found = step(make_ppo(roles, replays=ARMS[arm].replays, value_shadow=True), batch)
    expected = losses_by_definition(roles, experience, arm)
    assert found["value/clip_ratio"] > 0.1
    assert found["clip_ratio/region_mean"] > 0.02
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    credit = data.advantage.compute(experience)
    weights = weights_by_definition(
        arm, (experience.old_logps - experience.rollout.rollout_logps).exp(), experience.rollout.response_mask
    )
    advantages, returns = credit_by_definition(experience, weights[1])
    torch.testing.assert_close(credit.advantages.double(), advantages, rtol=0, atol=4e-6)
    torch.testing.assert_close(credit.returns.double(), returns, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("bootstrap", "value_loss"),
        ("reward at every token", "policy_loss"),
        ("whitened returns", "value_loss"),
        ("unclipped ratio", "policy_loss"),
        ("better of both values", "value_loss"),
    ],
)
def test_the_comparison_catches(mistake: str, name: str):
    roles, data, experience = roll_out()
    (batch,) = data.splitter.minibatches(experience)
    found = step(make_ppo(roles), batch)
    wrong = losses_by_definition(roles, experience, mistake=mistake)
    assert abs(found[name] - wrong[name]) > 3e-4


@pytest.mark.parametrize(
    ("estimator", "of_log_ratio"),
    [
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
    ],
)
def test_a_kl_in_the_loss_is_weighed_like_the_policy_loss(estimator, of_log_ratio):
    kl = KLConfig(weight=0.7, place="loss", estimator=estimator)
    roles, data, experience = roll_out(kl=kl)
    assert (experience.kl_penalty == 0).all()
    (batch,) = data.splitter.minibatches(experience)
    found = step(make_ppo(roles, kl_estimator=estimator), batch)
    log_ratio = seen_by(roles, "policy", experience.rollout) - seen_by(roles, "reference", experience.rollout)
    each = [of_log_ratio(float(d)) for d in log_ratio[experience.rollout.response_mask]]
    assert found["kl"] == pytest.approx(sum(each) / len(each), rel=1e-6)
    assert found["kl"] > 1e-2
    rest = found["policy_loss"] + 0.5 * found["value_loss"]
    assert found["loss"] == pytest.approx(rest + 0.7 * sum(each) / len(each), rel=1e-6)
    # no KL in the reward then: the returns are those of β = 0
    credit = data.advantage.compute(experience)
    _, returns = credit_by_definition(experience, experience.rollout.response_mask, kl_coef=0.0)
    torch.testing.assert_close(credit.returns.double(), returns, rtol=0, atol=4e-6)
    _, paid = credit_by_definition(experience, experience.rollout.response_mask, kl_coef=0.7)
    assert (credit.returns - paid).abs().max() > 0.01


def worst_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    assert max(float(g.abs().max()) for g in first.values()) > 1e-2
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("arm", ["shadow", "sparse_rl"])
@pytest.mark.parametrize("layout", ["hydra", "j_hydra"])
def test_micro_batches_and_separate_passes_do_not_change_the_gradient(layout: str, arm: str):
    roles, data, experience = roll_out(layout, arm)
    whole = list(data.splitter.minibatches(experience))
    module = make_ppo(roles, replays=ARMS[arm].replays, value_shadow=True)
    expected = gradients_of(module, whole)
    for parts in (BOTH, (("policy",), ("value",))):
        data.splitter.tokens_per_pass = 80  # five responses of up to 16 tokens
        data.splitter.learner_parts = parts
        batches = list(data.splitter.minibatches(experience))
        n_passes = len({tokens_of(batch.rollout)[0] for batch in batches})
        assert n_passes >= 3
        assert [batch.ends_step for batch in batches] == [False] * (n_passes * len(parts) - 1) + [True]
        assert worst_difference(gradients_of(module, batches), expected) < 1e-5
        losses = [step(module, batch)["loss"] for batch in batches]
        assert sum(losses) == pytest.approx(step(module, whole[0])["loss"], rel=1e-6)
    # the control: denominators of their own for every micro-batch
    alone = [replace(batch, n_response_tokens=int(batch.rollout.response_mask.sum())) for batch in batches]
    assert worst_difference(gradients_of(module, alone), expected) > 1e-3


@pytest.mark.parametrize(
    ("layout", "arm", "value_shadow", "n_forwards"),
    [
        ("j_hydra", "shadow", True, 1),
        ("j_hydra", "shadow", False, 2),
        ("j_hydra", "naive", False, 1),
        ("j_hydra", "naive", True, 2),
        ("hydra", "shadow", True, 2),
        ("lora_ppo", "shadow", True, 2),
    ],
)
def test_policy_and_critic_share_a_forward_where_it_is_the_same(layout, arm, value_shadow, n_forwards):
    roles, data, experience = roll_out(
        layout, arm, roles_config=RolesConfig(value_view="shadow" if value_shadow else "dense")
    )
    module = make_ppo(roles, replays=ARMS[arm].replays, value_shadow=value_shadow)
    assert len(module.learner_parts) == n_forwards
    (batch,) = data.splitter.minibatches(experience)
    with counted_forwards(roles) as forwards:
        found = step(module, batch)
    assert len(forwards) == n_forwards
    # shared or not, the values are those of the critic's own view
    expected = losses_by_definition(roles, experience, arm, value_shadow)
    assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
    other = losses_by_definition(roles, experience, arm, not value_shadow)
    assert abs(other["value_loss"] - expected["value_loss"]) > 1e-3


def test_one_part_learns_at_a_time_unless_that_is_turned_off():
    roles = make_roles("hydra", ROLES)
    assert make_ppo(roles).learner_parts == (("policy",), ("value",))
    assert make_ppo(roles, separate_passes=False).learner_parts == BOTH


def n_steps(target_kl: float | None, n_epochs: int = 3) -> int:
    """Return the optimizer steps of two iterations with two minibatches per epoch."""
    roles = make_roles("hydra", ROLES)
    module = make_ppo(roles, target_kl=target_kl)
    options = {"n_epochs": n_epochs, "n_minibatches": 2, "tokens_per_pass": 64}
    return train_here(module, make_data(roles, learner_parts=module.learner_parts, **options), 2).n_steps


def test_an_iteration_ends_early_once_the_policy_has_moved_too_far():
    # 3 epochs · 2 minibatches in each of 2 iterations
    assert n_steps(None) == 12
    assert n_steps(1e6) == 12
    # The first step of a rollout is at KL 0; the second finds more than 1e-6 and is the last.
    assert n_steps(1e-6) == 4
    # What the last step of a rollout finds does not end the next rollout.
    assert n_steps(1e-6, n_epochs=1) == 4


def test_responses_that_were_cut_count_nothing_in_the_policy_loss():
    roles, data, experience = roll_out()
    (plain,) = data.splitter.minibatches(experience)
    data.splitter.algorithm = replace(data.splitter.algorithm, mask_truncated=True)
    (masked,) = data.splitter.minibatches(experience)
    is_cut = ~((masked.rollout.input_ids == data.tokenizer.eos_token_id) & masked.rollout.response_mask).any(
        dim=1
    )
    assert 0 < is_cut.sum() < len(is_cut)
    assert (masked.loss_weight[is_cut] == 0).all()
    assert (plain.loss_weight > 0).equal(plain.rollout.response_mask)
    assert (masked.loss_weight > 0)[~is_cut].equal(masked.rollout.response_mask[~is_cut])
    # the policy learns as if they were not there, the critic from all
    kept = replace(masked.rows(~is_cut), n_response_tokens=int(masked.rollout.response_mask[~is_cut].sum()))
    module = make_ppo(roles)
    ours, alone, all_ = (module.training_step(batch, 0) for batch in (masked, kept, plain))
    torch.testing.assert_close(ours["policy_loss"], alone["policy_loss"])
    torch.testing.assert_close(ours["value_loss"], all_["value_loss"])
    assert (ours["policy_loss"] - all_["policy_loss"]).abs() > 1e-3
    assert (ours["value_loss"] - alone["value_loss"]).abs() > 1e-3


def steered(roles: Roles, target: float) -> RolloutDataModule:
    return make_data(roles, kl=replace(PAID, target=target, horizon=160.0))


def test_the_weight_of_the_kl_is_steered_to_its_target_and_comes_back_with_the_state():
    roles = shift(make_roles("hydra", ROLES))
    data = steered(roles, target=1e-3)
    first = data.collect()
    # 16 responses over a horizon of 160, error kept within 0.2: 0.3 · (1 + 0.2 · 0.1)
    assert first.kl_coef == 0.3
    assert data.kl.coef == pytest.approx(0.306)
    raised = next(iter(data.train_dataloader()))
    second = data.collect()
    assert second.kl_coef == pytest.approx(0.306 * 1.02)
    log_ratio = (second.old_logps - second.ref_logps).masked_fill(~second.rollout.response_mask, 0.0)
    torch.testing.assert_close(second.kl_penalty, second.kl_coef * log_ratio)
    assert raised.kl_coef == 0.0  # of a term in the loss, which there is not

    restored = steered(roles, target=1e-3)
    restored.load_state_dict(data.state_dict())
    assert restored.kl.coef == data.kl.coef != steered(roles, target=1e-3).kl.coef

    lowered = steered(roles, target=1e3)
    lowered.collect()
    assert lowered.kl.coef == pytest.approx(0.3 * 0.98)


def test_a_kl_in_the_loss_is_steered_too():
    roles = shift(make_roles("hydra", ROLES))
    kl = KLConfig(weight=0.3, place="loss", estimator="k3", target=1e-3, horizon=160.0)
    data = make_data(roles, kl=kl)
    weights = [next(iter(data.train_dataloader())).kl_coef for _ in range(3)]
    assert weights == pytest.approx([0.3, 0.306, 0.306 * 1.02])


@pytest.mark.parametrize("arm", ARMS)
def test_every_role_reads_the_rollout_under_the_view_of_its_arm(arm: str):
    roles = shift(make_roles("hydra", ROLES))
    experience = make_data(roles, arm, roles_config=RolesConfig(value_view="shadow")).collect()
    replays = ARMS[arm].replays
    found = {"policy": experience.old_logps, "reference": experience.ref_logps, "value": experience.values}
    for role, shadow in {"policy": replays, "reference": replays, "value": True}.items():
        expected, other = (seen_by(roles, role, experience.rollout, view) for view in (shadow, not shadow))
        assert (found[role] - expected).abs().max() < 1e-4, role
        # where nothing is evicted, both views are one
        assert ((found[role] - other).abs().max() > 1e-2) == (arm != "dense"), role
    dense = make_data(roles, arm, roles_config=RolesConfig(value_view="dense")).collect()
    assert (dense.values - seen_by(roles, "value", dense.rollout, False)).abs().max() < 1e-4


def trained_by(layout: str, *learners: str) -> set[str]:
    """Return the adapters, heads and backbones that get a gradient from a micro-batch of these learners."""
    roles, data, experience = roll_out(layout)
    (batch,) = data.splitter.minibatches(experience)
    gradients = gradients_of(make_ppo(roles), [replace(batch, learners=learners, ends_step=False)])
    found = set()
    for name in (name for name, gradient in gradients.items() if gradient.abs().max() > 0):
        parts = name.split(".")
        found.add(parts[-2] if "lora_" in name else ".".join(parts[1:3]))
    return found


@pytest.mark.parametrize(
    ("layout", "by_policy", "by_critic"),
    [
        ("hydra", {"policy"}, {"value", "heads.value"}),
        ("dynamic_lora", {"policy"}, {"value", "heads.value"}),
        ("j_hydra", {"joint"}, {"joint", "heads.value"}),
        ("ppo", {"backbones.policy"}, {"backbones.value", "heads.value"}),
    ],
)
def test_gradients_reach_the_learner_alone(layout: str, by_policy: set[str], by_critic: set[str]):
    assert trained_by(layout, "policy") == by_policy
    assert trained_by(layout, "value") == by_critic
    assert trained_by(layout, "policy", "value") == by_policy | by_critic
