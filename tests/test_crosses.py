"""Every algorithm trains with every correction, distillation, layout and reward, from the shipped configs."""

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.callbacks.rollout_statistics import RolloutStatistics
from lit_rlkv.config import CONF_DIR, Config, build
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import find_starting_model
from lit_rlkv.stages.rl import train_policy
from tests.hand_built import MetricLog
from tests.tiers import pairwise, short_tier, slow
from tests.whole_runs import TINY

SMALL = [
    *TINY,
    "experiment=none",
    "rollout.n_prompts=4",
    "roles.rank=4",
    "reward=mixed",  # this model is seldom right, and groups that agree on that teach nothing
    "sft.n_steps=100",
    "sft.optimizer.lr=0.01",
]
ALGORITHMS = ("ppo", "grpo", "online_dpo")
ARMS = ("dense", "naive", "tis", "mis", "sparse_rl", "shadow")
DISTILLATIONS = ("none", "sparse_student", "dense_student")


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config", overrides=[*SMALL, *overrides])


def config(folder: Path, *overrides: str) -> Config:
    """Return the config of these overrides; each option is composed once, because composing is slow."""
    cfg = copy.deepcopy(composed())
    choices = [override for override in overrides if "." not in override.split("=")[0]]
    for choice in choices:
        group = choice.split("=")[0]
        cfg[group] = composed(choice)[group]
    settings = [override for override in overrides if override not in choices]
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"runs_dir={folder}", *settings]))
    return checked_config(cfg)


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory, share_sft_model) -> Path:
    """A folder that holds the SFT model that all runs start from."""
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    return folder


@dataclass(frozen=True)
class Done:
    """A finished run."""

    module: PolicyModule
    metrics: list[dict[str, float]]
    n_steps: int
    n_moved: int
    """Parameters that training changed; those that it may change: `n_trainable`."""
    n_trainable: int

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(row["loss"] for row in self.metrics)


Train = Callable[..., Done]


@pytest.fixture(scope="module")
def train(sft_runs: Path) -> Train:
    """From overrides to a finished run of two iterations, done once for each set of overrides."""

    @cache
    def done(*overrides: str) -> Done:
        return run(sft_runs, sft_runs / "run", *overrides)

    return done


def run(
    sft_runs: Path, folder: Path, *overrides: str, resumes: bool = False, watching: Sequence[RLCallback] = ()
) -> Done:
    cfg = config(sft_runs, "stages=[rl]", *overrides)
    parts = Run(cfg, folder=folder)
    start = find_starting_model(cfg, folder)
    assert start is not None
    module = make_policy(parts, start)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    log = MetricLog()
    distills = [] if cfg.distillation is None else [build(cfg.distillation)]
    callbacks = [RolloutStatistics(), *distills, *watching, log]
    if not resumes:
        shutil.rmtree(parts.checkpoints.root, ignore_errors=True)
    train_policy(parts, module, callbacks)
    after = dict(module.named_parameters())
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    trainable = [name for name, p in after.items() if p.requires_grad]
    assert set(moved) <= set(trainable)
    return Done(module, log.rows, log.n_steps, len(moved), len(trainable))


CROSSES = [
    (algorithm, name, distillation)
    for algorithm in ALGORITHMS
    for name in ARMS
    for distillation in DISTILLATIONS
    if distillation == "none" or name != "dense"
]


@pytest.mark.parametrize(("algorithm", "name", "distillation"), pairwise(CROSSES))
def test_every_algorithm_trains_with_every_correction_and_distillation(
    train: Train, algorithm: str, name: str, distillation: str
):
    done = train(f"algorithm={algorithm}", f"distillation={distillation}", f"correction={name}")
    assert len(done.metrics) == 2
    assert done.n_steps == 4
    for row in done.metrics:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["grad_norm"] > 0
        assert ("smd/kl" in row) == (distillation != "none")
        assert ("value_loss" in row) == (algorithm == "ppo")
        if name in ("dense", "shadow"):
            assert row["kv/replay_gap"] < 1e-4
        assert (row["rollout_corr/k3_kl"] > 1e-6) == (name not in ("dense", "shadow"))
    assert done.n_moved == done.n_trainable


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_correction_and_distillation_gives_different_losses(train: Train, algorithm: str):
    crosses = [(name, distillation) for other, name, distillation in CROSSES if other == algorithm]
    losses = {
        train(f"algorithm={algorithm}", f"distillation={d}", f"correction={name}").losses
        for name, d in crosses
    }
    assert len(losses) == len(crosses) == 16


PPO = ["algorithm=ppo", "distillation=none"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_trains_in_every_layout(train: Train, layout: str):
    done, hydra = train(*PPO, f"roles={layout}"), train(*PPO)
    assert all(math.isfinite(value) for row in done.metrics for value in row.values())
    assert done.n_moved == done.n_trainable
    first = ("reward", "rewards/learned", "num_tokens", "value/explained_variance", "objective/kl")
    for name in first:
        assert done.metrics[0][name] == pytest.approx(hydra.metrics[0][name], rel=1e-5, abs=1e-6)
    is_same_training = layout in ("hydra", "lora_ppo", "dynamic_lora")
    assert (done.losses == pytest.approx(hydra.losses, rel=1e-4)) == is_same_training


SHARES = {"learned": (0.0, 1.0), "mixed": (0.5, 0.5)}
"""Weights of the verifier and of the learned reward in a `reward` preset."""
REWARDED = list(product(ALGORITHMS, SHARES))


@pytest.mark.parametrize(
    ("algorithm", "reward"),
    short_tier(REWARDED, [("ppo", "learned"), ("grpo", "mixed"), ("online_dpo", "mixed")]),
)
def test_verifier_and_reward_model_are_both_logged(train, algorithm, reward):
    verifier, learned = SHARES[reward]
    row = train(f"algorithm={algorithm}", "distillation=none", f"reward={reward}").metrics[0]
    assert row["rewards/learned"] != 0.0
    expected = verifier * row["rewards/exact_match"] + learned * row["rewards/learned"]
    assert row["reward"] == pytest.approx(expected, rel=1e-5)


def test_without_a_learned_reward_no_reward_role_is_built(train: Train):
    done = train(*PPO, "reward=verifier")
    assert "rewards/learned" not in done.metrics[0]
    assert done.module.roles.needed == ("policy", "reference", "value")


@pytest.mark.parametrize(
    "option",
    [
        "algorithm.loss.separate_passes=false",
        "algorithm.loss.target_kl=1000.0",
        "roles.gradient_checkpointing=true",
        "fabric.tokens_per_pass=48",
    ],
)
def test_settings_that_save_memory_or_time_do_not_change_the_training(train: Train, option: str):
    assert train(*PPO, option).losses == pytest.approx(train(*PPO).losses, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        slow(["algorithm.advantage.gamma=0.9"]),
        ["algorithm.advantage.lam=0.5"],
        slow(["algorithm.advantage.whiten_advantages=false"]),
        slow(["algorithm.kl.weight=0.2"]),
        ["algorithm.kl.estimator=k3"],
        slow(["algorithm.kl.place=loss", "algorithm.kl.estimator=k3"]),
        ["algorithm.kl.target=1.0", "algorithm.kl.horizon=16.0"],
        ["algorithm.loss.value_clip=0.001"],
        slow(["algorithm.loss.value_weight=2.0"]),
        slow(["algorithm.loss.value_lr_scale=1.0"]),
        slow(["algorithm.n_warmup_steps=1"]),
        ["algorithm.loss.target_kl=1e-9", "algorithm.n_epochs=2"],
        slow(["algorithm.mask_truncated=true"]),
        slow(["reward.normalize=batch"]),
        ["reward.normalize=running"],
        slow(["reward.clip=0.01"]),
        slow(["reward.missing_eos_penalty=1.0"]),
        ["algorithm.critic_warmup=1"],
        slow(["roles.value_init=reward"]),
        ["roles.value_view=dense"],
        slow(["roles.rank=8"]),
    ],
    ids=lambda options: options[0],
)
def test_options_of_ppo_change_the_training(train: Train, options: list[str]):
    done = train(*PPO, *options)
    plain = train(*PPO, *(option for option in options if "n_epochs" in option))
    assert done.losses != plain.losses


@pytest.mark.parametrize(
    "options",
    [
        slow(["algorithm.advantage.drop_ties=false", "reward=verifier"]),
        slow(["algorithm.kl.weight=1.0"]),
        slow(["algorithm.loss.beta=1.0"]),
        ["algorithm.loss.kind=ipo"],
        slow(["algorithm.loss.label_smoothing=0.2"]),
        slow(["algorithm.loss.averages=true"]),
    ],
    ids=lambda options: options[0].split("=")[0],
)
def test_options_of_online_dpo_change_the_training(train: Train, options: list[str]):
    plain = train(
        "algorithm=online_dpo", "distillation=none", *(o for o in options if o.startswith("reward="))
    )
    done = train("algorithm=online_dpo", "distillation=none", *options)
    assert done.losses != plain.losses


def test_a_resumed_run_equals_an_uninterrupted_one(sft_runs: Path, tmp_path: Path):
    """The critic, the KL's weight, the moments of the rewards and the optimizer all come back."""
    steered = ["algorithm.kl.target=1.0", "algorithm.kl.horizon=16.0", "reward.normalize=running"]
    options = [*PPO, *steered, "algorithm.n_iterations=3", "roles=j_hydra"]
    straight = run(sft_runs, tmp_path / "run", *options)
    (tmp_path / "run" / "checkpoints" / "iteration-000003").rename(tmp_path / "last")
    resumed = run(sft_runs, tmp_path / "run", *options, resumes=True)
    timeless = {name for name in straight.metrics[-1] if not name.startswith(("time/", "tokens_per"))}
    assert len(resumed.metrics) == 1
    assert {n: resumed.metrics[-1][n] for n in timeless} == {n: straight.metrics[-1][n] for n in timeless}
    assert len({row["objective/kl_weight"] for row in straight.metrics}) == 3
    weights = "trainable.safetensors"
    again = (tmp_path / "run" / "checkpoints" / "iteration-000003" / weights).read_bytes()
    assert (tmp_path / "last" / weights).read_bytes() == again
