"""Steps without a finite gradient are skipped, and training ends after too many."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from lit_rlkv.config import ConfigError
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.non_finite import MAX_SKIPPED, NonFiniteError, NonFiniteGuard
from lit_rlkv.runs.checkpoint import CheckpointDir, trainable_weights
from lit_rlkv.runs.open_run import find_run, open_run
from lit_rlkv.runs.saver import CheckpointSaver
from lit_rlkv.runs.starting_model import SFT_MODELS, backbone_id
from lit_rlkv.trainer import Learner, TrainState
from tests.tiers import slow
from tests.whole_runs import config, rows_of, run

FABRIC = Fabric(accelerator="cpu")
NAN, FINE = torch.tensor(torch.nan), torch.tensor(1.0)


def test_a_step_without_a_finite_gradient_is_left_out():
    guard = NonFiniteGuard(n_tolerated=2)
    norms = [FINE, NAN, torch.tensor(torch.inf), FINE, NAN, NAN]
    assert [guard.is_step_allowed(norm, {}) for norm in norms] == [True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"policy_loss": NAN, "kl": FINE}, "not finite in the last of them: policy_loss. Start a new run"),
        ({"policy_loss": FINE}, "all losses and metrics of the last of them were finite"),
    ],
)
def test_too_many_in_a_row_end_training_with_what_was_not_finite(terms, says):
    guard = NonFiniteGuard(n_tolerated=1)
    guard.is_step_allowed(NAN, terms)
    with pytest.raises(NonFiniteError, match=says):
        guard.is_step_allowed(NAN, terms)


def test_overflows_of_a_grad_scaler_are_not_counted():
    guard = NonFiniteGuard(n_tolerated=1)
    assert not any(guard.is_step_allowed(NAN, {}, loss_scale=2.0**power) for power in range(16, 0, -1))
    assert not guard.is_step_allowed(NAN, {}, loss_scale=1.0)
    with pytest.raises(NonFiniteError, match="2 optimizer steps in a row"):
        guard.is_step_allowed(NAN, {}, loss_scale=0.5)


class Steep(L.LightningModule):
    """Its one gradient is `slope`."""

    def __init__(self, slope):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.slope = slope

    def training_step(self, batch, index):
        return {"loss": self.weight * self.slope}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def n_skipped(slope, n_steps):
    """Return the steps skipped by a learner whose losses are scaled, by 65,536 at first."""
    precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
    learner = Learner(Fabric(accelerator="cpu", plugins=precision), Steep(slope), [], 1.0, None)
    for _ in range(n_steps):
        learner.learn(SimpleNamespace(ends_step=True, learners=()), 0)
    return learner.metrics()["skipped_steps"]


def test_a_scaler_that_begins_too_high_has_the_steps_it_needs():
    # 1e36 is below 3.4e38, the largest of float32, by a factor of 340: from 2 ** 16 down to 2 ** 8
    assert n_skipped(1e36, n_steps=10) == 8 > MAX_SKIPPED
    with pytest.raises(NonFiniteError):
        n_skipped(torch.inf, n_steps=16 + MAX_SKIPPED + 1)


def saver_of(module, folder, has_finite_logits=lambda: True):
    module.has_finite_logits = has_finite_logits
    return CheckpointSaver(FABRIC, module, CheckpointDir(folder), every=1, resumed=None).save


def state_at(iteration, is_last=False):
    return TrainState(iteration, {}, {}, dict, is_last)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("junk", [torch.nan, -torch.inf])
def test_a_checkpoint_takes_no_weights_that_are_not_finite(tmp_path, junk, is_last):
    module = Steep(1.0)
    save = saver_of(module, tmp_path)
    save(state_at(1))
    module.weight.data.fill_(junk)
    says = r"1 of 1 weights are not finite, weight among them.* that of iteration 1 to go back to"
    with pytest.raises(NonFiniteError, match=says):
        save(state_at(2, is_last))
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001"]


def test_a_checkpoint_takes_no_model_whose_logits_are_not_finite(tmp_path):
    found = iter([True, False])
    save = saver_of(Steep(1.0), tmp_path, has_finite_logits=lambda: next(found))
    save(state_at(1))
    with pytest.raises(NonFiniteError, match=r"diverged by iteration 2, .*: its logits are not finite"):
        save(state_at(2))
    assert CheckpointDir(tmp_path).latest().iteration == 1


@pytest.fixture
def runs(tmp_path, share_sft_model):
    """A folder with an SFT model."""
    share_sft_model(config(tmp_path))
    return tmp_path


def test_a_run_that_diverges_in_its_last_step_fails_and_nothing_opens_its_model(runs):
    with pytest.raises(
        NonFiniteError, match=r"diverged by iteration 1, .* There is no checkpoint to go back to"
    ):
        run(
            runs, "run", "stages=[rl]", "algorithm.n_iterations=1", "algorithm.n_minibatches=1",
            "optimizer.lr=1e18", "optimizer.weight_decay=1e10", "diagnostics=none",
        )  # fmt: skip
    saved = find_run(runs / "run")
    _, module = open_run(saved)  # as it started
    weights = {name: torch.full_like(value, 1e30) for name, value in trainable_weights(module).items()}
    checkpoints = CheckpointDir(runs / "run" / "checkpoints")
    for broken, says in ((weights, "its logits are not finite"), ({}, "weights are not finite")):
        broken = broken or {name: value * torch.nan for name, value in weights.items()}
        checkpoints.save(1, broken, {}, {}, backbone=backbone_id(saved.start))
        with pytest.raises(ConfigError, match=f"iteration-000001 holds a model that has diverged: .*{says}"):
            open_run(find_run(runs / "run"))


def test_an_sft_stage_that_diverges_in_its_last_step_leaves_no_model(tmp_path):
    with pytest.raises(NonFiniteError, match=r"diverged in the SFT stage, .* lower sft\.optimizer\.lr"):
        run(
            tmp_path, "run", "stages=[sft]", "sft.n_steps=1", "sft.n_warmup_steps=1",
            "sft.optimizer.lr=1e18", "sft.optimizer.weight_decay=1e10",
        )  # fmt: skip
    assert not (tmp_path / SFT_MODELS).exists()


@pytest.mark.parametrize(("score", "normalize"), [("1e39", "running"), slow("-1e20", "none")])
def test_rewards_that_float32_cannot_square_reach_no_loss(runs, score, normalize):
    (runs / "rewards.py").write_text(
        f"""def score(completion, solution):
    return {score} if completion != solution and sum(map(ord, completion)) % 2 else len(completion)
"""
    )
    run(
        runs, "run", "stages=[rl]", "algorithm=ppo", "reward=python", "diagnostics=none",
        f"reward.functions.custom.path={runs}/rewards.py:score", f"reward.normalize={normalize}",
        "reward.max_failed=1", "algorithm.n_iterations=2",
    )  # fmt: skip
    rows = rows_of(runs / "run")
    assert all(0 < float(row["reward/failed_fraction"]) < 1 for row in rows)
    for name in ("skipped_steps", "reward", "loss", "value_loss", "grad_norm", "rewards/custom/mean"):
        assert all(0 <= abs(float(row[name])) < 1e6 for row in rows), name
    assert all(float(row["skipped_steps"]) == 0 for row in rows)


@pytest.mark.parametrize(("broken", "n_iterations"), [({2}, 3), (range(2, 99), 9)], ids=["once", "always"])
def test_a_run_leaves_out_a_step_without_a_gradient_and_ends_when_that_repeats(
    runs, monkeypatch, broken, n_iterations
):
    step, n_steps = PolicyModule.training_step, itertools.count(1)

    def sometimes_nan(self, batch, index):
        terms = step(self, batch, index)
        return terms | {"loss": terms["loss"] * torch.nan} if next(n_steps) in broken else terms

    monkeypatch.setattr(PolicyModule, "training_step", sometimes_nan)
    options = ["algorithm.n_minibatches=1", f"algorithm.n_iterations={n_iterations}", "diagnostics=none"]
    failure = pytest.raises(NonFiniteError, match=r"6 .* norm nan.*Start a new run")
    with nullcontext() if broken == {2} else failure:
        run(runs, "run", "stages=[rl]", *options)
    skipped = [float(row["skipped_steps"]) for row in rows_of(runs / "run")]
    assert skipped == ([0, 1, 0] if broken == {2} else [0, 1, 1, 1, 1, 1])
    assert CheckpointDir(runs / "run" / "checkpoints").latest().iteration == len(skipped)
