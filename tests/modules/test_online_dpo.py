"""Online DPO against its formulas, written out here as loops over pairs and tokens in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.advantages import PairAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.replay import replay_logps
from lit_rlkv.modules.online_dpo import OnlineDPO
from lit_rlkv.types import TrainBatch
from tests.hand_built import (
    ARMS,
    gradients_of,
    make_datamodule,
    make_dpo,
    make_roles,
    shift,
    steps_of,
    tokens_of,
    with_rewards,
)
from tests.modules.test_grpo import weights_by_definition

KINDS = [
    {"kind": "sigmoid"},
    {"kind": "sigmoid", "label_smoothing": 0.1},
    {"kind": "ipo"},
    {"kind": "ipo", "averages": True},
    {"kind": "sigmoid", "averages": True, "beta": 2.0},
]
REWARDS = [0, 1, 0, 0, 1, 1, 1, 1, 2, 3, -1, 0, 0, 1, 1, 0]
"""Four responses to each of four prompts; those to the second tie."""
PAIRS = [(0 + 1, 0 + 3), (8 + 1, 8 + 2), (12 + 1, 12 + 3)]
"""The first best and the last worst response of the other groups."""


def make_data(roles: Roles, arm: str = "shadow", drop_ties: bool = True, **options) -> RolloutDataModule:
    return make_datamodule(roles, correction=ARMS[arm], advantage=PairAdvantage(drop_ties), **options)


def roll_out(arm: str = "shadow", **options) -> tuple[Roles, RolloutDataModule, Experience]:
    """A rollout in which one group of four is a tie, and a policy that has moved on since."""
    roles = shift(make_roles())
    data = make_data(roles, arm, **options)
    experience = with_rewards(data.collect(), REWARDS)
    for name, parameter in roles.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(2.0)
    return roles, data, experience


def loss_by_definition(
    roles: Roles,
    experience: Experience,
    arm: str = "shadow",
    *,
    beta: float = 0.5,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    averages: bool = False,
    shadow: bool | None = None,
    mistake: str = "",
) -> float:
    """Mean over pairs of the loss of h = Σ_better w·(log π − log π_ref) − Σ_worse w·(log π − log π_ref)."""
    rollout, response_mask = experience.rollout, experience.rollout.response_mask
    shadow = ARMS[arm].replays if shadow is None else shadow
    with torch.no_grad():
        with acting_as(roles, "policy") as backbone:
            logps = replay_logps(backbone, rollout, shadow=shadow).double()
        with acting_as(roles, "reference") as backbone:
            ref_logps = replay_logps(backbone, rollout, shadow=shadow).double()
    rho = (experience.old_logps - rollout.rollout_logps).double().exp()
    weight = (
        torch.ones_like(rho) if mistake == "unweighted" else weights_by_definition(arm, rho, response_mask)[0]
    )

    def margin(row: int) -> float:
        columns = response_mask[row].nonzero().flatten().tolist()
        terms = [float(weight[row, c]) * float(logps[row, c] - ref_logps[row, c]) for c in columns]
        return sum(terms) / (len(terms) if averages else 1)

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    losses = []
    for better, worse in PAIRS:
        h = margin(better) - margin(worse)
        h = margin(better) + margin(worse) if mistake == "sum of sides" else h
        if kind == "ipo":
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            e = label_smoothing
            losses.append(-(1 - e) * log_sigmoid(beta * h) - e * log_sigmoid(-beta * h))
    return sum(losses) / (4 if mistake == "ties count" else len(losses))


def loss_of(module: OnlineDPO, batch: TrainBatch) -> float:
    return float(module.training_step(batch, 0)["loss"].detach())


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_loss_equals_its_definition(options: dict):
    roles, data, experience = roll_out()
    (batch,) = data.splitter.minibatches(experience)
    found = loss_of(make_dpo(roles, **options), batch)
    assert found == pytest.approx(loss_by_definition(roles, experience, **options), rel=1e-6, abs=1e-6)
    # the control: log-probs of the whole text, which the sampler did not see
    dense = loss_by_definition(roles, experience, shadow=False, **options)
    assert abs(found - dense) > 1e-3


@pytest.mark.parametrize("mistake", ["sum of sides", "ties count"])
def test_the_comparison_catches(mistake: str):
    roles, data, experience = roll_out()
    (batch,) = data.splitter.minibatches(experience)
    wrong = loss_by_definition(roles, experience, mistake=mistake)
    assert abs(loss_of(make_dpo(roles), batch) - wrong) > 1e-3


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_weighs_the_log_ratio_of_an_action(arm: str):
    roles, data, experience = roll_out(arm)
    (batch,) = data.splitter.minibatches(experience)
    found = loss_of(make_dpo(roles, ARMS[arm].replays), batch)
    assert found == pytest.approx(loss_by_definition(roles, experience, arm), rel=1e-6, abs=1e-6)
    unweighted = loss_by_definition(roles, experience, arm, mistake="unweighted")
    assert (abs(found - unweighted) > 1e-4) == (arm in ("tis", "mis", "sparse_rl"))


@pytest.mark.parametrize("averages", [False, True])
def test_the_logged_rewards_are_those_of_the_pairs_whatever_the_loss_averages(averages):
    roles, data, experience = roll_out()
    (batch,) = data.splitter.minibatches(experience)
    found = {
        name: float(value)
        for name, value in make_dpo(roles, averages=averages).training_step(batch, 0).items()
        if name != "loss"
    }
    rollout = experience.rollout
    with torch.no_grad():
        with acting_as(roles, "policy") as backbone:
            logps = replay_logps(backbone, rollout).sum(dim=1).tolist()
        with acting_as(roles, "reference") as backbone:
            ref_logps = replay_logps(backbone, rollout).sum(dim=1).tolist()
    sides = [[logps[row] - ref_logps[row] for row in pair] for pair in PAIRS]
    chosen, rejected = (0.5 * sum(pair[side] for pair in sides) / 3 for side in (0, 1))
    expected = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": sum(better > worse for better, worse in sides) / 3,
        "logps/chosen": sum(logps[better] for better, _ in PAIRS) / 3,
        "logps/rejected": sum(logps[worse] for _, worse in PAIRS) / 3,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def rows_of(experience: Experience, batch: TrainBatch) -> list[int]:
    """Return the rows of the rollout that are in a batch."""
    rows = tokens_of(experience.rollout)
    return [rows.index(row) for row in tokens_of(batch.rollout)]


def test_pairs_whose_sides_are_tied_count_nothing():
    roles, data, experience = roll_out()
    (batch,) = data.splitter.minibatches(experience)
    assert batch.n_pairs == 3
    tied = with_rewards(experience, [0.5] * 16)
    (batch,) = data.splitter.minibatches(tied)
    module = make_dpo(roles)
    assert loss_of(module, batch) == 0.0
    assert all((gradient == 0).all() for gradient in gradients_of(module, [batch]).values())

    data.splitter.advantage = PairAdvantage(drop_ties=False)
    (batch,) = data.splitter.minibatches(tied)
    assert loss_of(module, batch) > 0.1
    assert max(float(g.abs().max()) for g in gradients_of(module, [batch]).values()) > 1e-2


@pytest.mark.parametrize(
    ("n_minibatches", "tokens_per_pass", "n_batches"),
    # a pair alone, however long; pairs of up to 16 tokens a side, two of which fit into 64
    [(1, 1, 4), (2, 1, 4), (3, TOKENS_PER_PASS, 3), (1, 64, 2)],
)
def test_no_split_parts_a_pair(n_minibatches: int, tokens_per_pass: int, n_batches: int):
    _, data, experience = roll_out(n_minibatches=n_minibatches, n_epochs=2, tokens_per_pass=tokens_per_pass)
    batches = list(data.splitter.minibatches(experience))
    assert len(batches) == 2 * n_batches
    seen = []
    for batch in batches:
        rows = rows_of(experience, batch)
        seen += [(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    assert sorted(seen) == sorted(2 * [*PAIRS, (4, 7)])


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_micro_batches_do_not_change_the_gradient(kind: str):
    roles, data, experience = roll_out(n_minibatches=2)
    module = make_dpo(roles, kind=kind)
    whole = steps_of(list(data.splitter.minibatches(experience)))
    data.splitter.tokens_per_pass = 1  # a pair at a time
    split = steps_of(list(data.splitter.minibatches(experience)))
    for one, parts in zip(whole, split, strict=True):
        assert (len(one), len(parts)) == (1, 2)
        expected, found = gradients_of(module, one), gradients_of(module, parts)
        assert difference(found, expected) < 1e-5
        assert sum(loss_of(module, part) for part in parts) == pytest.approx(
            loss_of(module, one[0]), rel=1e-6
        )
        # the control: each micro-batch divides by its own number of pairs
        alone = [replace(part, n_pairs=1) for part in parts]
        if one[0].n_pairs > 1:
            assert difference(gradients_of(module, alone), expected) > 1e-3


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of two gradients, as a share of the largest entry."""
    largest = max(float(g.abs().max()) for g in second.values())
    assert largest > 1e-3
    return max(float((first[name] - second[name]).abs().max()) for name in second) / largest


def test_options_that_make_no_loss_are_refused_when_the_module_is_built():
    roles = make_roles()
    for options, says in (
        ({"beta": 0.0}, r"beta must be a number above 0, got 0\.0"),
        ({"kind": "hinge"}, "kind='hinge' is unknown"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be at least 0 and below 0\.5, got 0\.5"),
    ):
        with pytest.raises(ValueError, match=says):
            make_dpo(roles, **options)


def test_pairs_with_a_response_that_was_cut_count_nothing_where_that_is_asked_for():
    roles, data, experience = roll_out(mask_truncated=True)
    # of the three pairs that do not tie, only the last has two sides that ended
    has_eos = torch.ones(16, dtype=torch.bool)
    has_eos[PAIRS[0][0]] = has_eos[PAIRS[1][1]] = False
    (batch,) = data.splitter.minibatches(replace(experience, has_eos=has_eos))
    assert batch.n_pairs == 1
    found = gradients_of(make_dpo(roles), [batch])
    only = with_rewards(experience, [*[0] * 12, *REWARDS[12:]])
    data.splitter.algorithm = replace(data.splitter.algorithm, mask_truncated=False)
    (alone,) = data.splitter.minibatches(only)
    assert loss_of(make_dpo(roles), batch) == pytest.approx(loss_of(make_dpo(roles), alone), rel=1e-6)
    assert difference(found, gradients_of(make_dpo(roles), [alone])) < 1e-5
