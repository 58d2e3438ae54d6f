"""Parts of a rollout, and denominators of the loss against the formulas of TRL 1.16."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.advantages import GroupAdvantage, PairAdvantage
from lit_rlkv.objectives.reduction import weighted_sum
from lit_rlkv.types import TrainBatch
from tests.hand_built import make_datamodule, make_roles, steps_of, tokens_of, with_rewards
from tests.tiers import short_tier

MAX_NEW_TOKENS = 10
HAS_EOS = torch.tensor([True] * 5 + [False] * 3 + [True] * 6 + [False] * 2)


def trl_loss(aggregation: str, losses: Tensor, mask: Tensor) -> Tensor:
    """The loss of one optimizer step, given token losses and TRL's completion mask."""
    if aggregation == "sequence":  # loss_type="grpo"
        return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if aggregation == "constant":  # loss_type="dr_grpo"
        return (losses * mask).sum() / (losses.size(0) * MAX_NEW_TOKENS)
    # loss_type="dapo", where num_items_in_batch is of the step, as with one minibatch
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def made_steps(**options: object) -> list[list[TrainBatch]]:
    """Micro-batches by step; `old_logps` are token losses, `ref_logps` 1 in responses that ended."""
    data = make_datamodule(make_roles(), tokens_per_pass=64, **options)
    experience = data.collect()
    shape = experience.old_logps.shape
    losses = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    has_ended = HAS_EOS[:, None].float().expand(shape)
    experience = replace(experience, has_eos=HAS_EOS, old_logps=losses, ref_logps=has_ended)
    return steps_of(data.splitter.minibatches(experience))


def both_losses(batches: list[TrainBatch], aggregation: str, *, is_masked: bool) -> tuple[float, float]:
    """Return our loss of one step, added up over micro-batches, and TRL's."""
    ours = sum(weighted_sum(b.old_logps.double(), b.loss_weight.double()) for b in batches)
    rows = [
        (losses[response], keeps[response])
        for b in batches
        for losses, keeps, response in zip(b.old_logps, b.ref_logps, b.rollout.response_mask, strict=True)
    ]
    losses, mask = torch.zeros(2, len(rows), MAX_NEW_TOKENS, dtype=torch.float64)
    for number, (of_row, keeps) in enumerate(rows):
        losses[number, : len(of_row)] = of_row
        mask[number, : len(of_row)] = keeps if is_masked else 1.0
    return float(ours), float(trl_loss(aggregation, losses, mask))


CASES = [
    (aggregation, masks, n_minibatches, n_epochs)
    for aggregation in ("sequence", "constant", "token")
    for masks in (False, True)
    for n_minibatches in (1, 2, 4)
    for n_epochs in (1, 2)
]
SHORT = [("sequence", True, 4, 2), ("constant", True, 2, 1), ("token", True, 1, 1), ("sequence", False, 2, 1)]


@pytest.mark.parametrize(
    ("aggregation", "mask_truncated", "n_minibatches", "n_epochs"), short_tier(CASES, SHORT)
)
def test_every_step_has_the_denominators_of_trl(aggregation, mask_truncated, n_minibatches, n_epochs):
    steps = made_steps(
        aggregation=aggregation,
        mask_truncated=mask_truncated,
        n_minibatches=n_minibatches,
        n_epochs=n_epochs,
    )
    assert len(steps) == n_minibatches * n_epochs
    for batches in steps:
        assert len(batches) > 1 or n_minibatches == 4
        ours, theirs = both_losses(batches, aggregation, is_masked=mask_truncated)
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_groups_of_equal_rewards_stay_out_of_denominators_with_their_truncated_responses(aggregation):
    data = make_datamodule(
        make_roles(),
        advantage=GroupAdvantage("dapo", filter_zero_std_groups=True),
        aggregation=aggregation,
        mask_truncated=True,
        n_minibatches=1,
    )
    experience = with_rewards(data.collect(), [1.0, 1, 1, 1] + [1.0, 0, 0, 0] * 3)
    has_eos = torch.ones(16, dtype=torch.bool)
    has_eos[[0, 4]] = False  # of a group that is dropped, and of one that stays
    (batch,) = data.splitter.minibatches(replace(experience, has_eos=has_eos))
    weights = batch.loss_weight.sum(dim=1)
    n_tokens = (batch.loss_weight > 0).sum(dim=1)
    assert int((n_tokens > 0).sum()) == 11
    expected = (n_tokens > 0).float() if aggregation == "sequence" else n_tokens / MAX_NEW_TOKENS
    torch.testing.assert_close(weights, expected / 12)  # responses in denominators: three groups of four


@pytest.mark.parametrize(("n_parts", "sizes"), [(1, [4]), (3, [2, 1, 1]), (4, [1, 1, 1, 1])])
def test_parts_are_whole_groups_under_the_denominators_of_one_step(n_parts, sizes):
    data = make_datamodule(make_roles(), n_minibatches=2, tokens_per_pass=48)
    experience = data.collect()
    parts = list(data.splitter.parts(experience, n_parts))
    assert [part.n_groups for part in parts] == sizes
    rows = tokens_of(experience.rollout)
    for part, size in zip(parts, sizes, strict=True):  # groups in order, nothing twice
        mine, rows = rows[: 4 * size], rows[4 * size :]
        assert sorted(row for batch in part.batches for row in tokens_of(batch.rollout)) == sorted(mine)
        # training learns from at most 48 tokens at a time: three responses of up to 16
        assert len(part.batches) >= 2
        assert max(batch.advantages.numel() for batch in part.batches) <= 48
        assert [batch.ends_step for batch in part.batches] == [False] * (len(part.batches) - 1) + [True]
        assert {batch.learners for batch in part.batches} == {("policy",)}
        weight = sum(float(batch.loss_weight.sum()) for batch in part.batches)
        assert weight == pytest.approx(part.share, abs=1e-5)
        assert part.share == pytest.approx(part.n_prompts / 4)  # every response weighs the same
        n_response_tokens = int(experience.rollout.response_mask.sum())
        assert all(batch.n_response_tokens == n_response_tokens for batch in part.batches)
        mine = sum(int(batch.rollout.response_mask.sum()) for batch in part.batches)
        assert part.token_share == pytest.approx(mine / n_response_tokens)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_share_of_a_part_is_of_what_its_loss_is_divided_by(aggregation: str):
    data = make_datamodule(make_roles(), aggregation=aggregation, mask_truncated=True)
    experience = data.collect()
    has_eos = torch.tensor([True] * 5 + [False] * 3 + [True] * 8)
    n_response_tokens = experience.rollout.response_mask.sum(dim=1)
    # A mean over responses counts those that were cut, a mean over tokens does not.
    counts = n_response_tokens * has_eos if aggregation == "token" else torch.ones(16)
    first, second = data.splitter.parts(replace(experience, has_eos=has_eos), 2)
    expected = float(counts[:8].sum() / counts.sum())
    assert [first.share, second.share] == pytest.approx([expected, 1 - expected])
    assert first.n_groups == second.n_groups == 2
    assert (expected == 0.5) == (aggregation != "token")
    assert first.token_share == pytest.approx(float(n_response_tokens[:8].sum() / n_response_tokens.sum()))


def test_parts_of_preference_pairs_keep_them_together_and_count_those_that_are_no_ties():
    data = make_datamodule(make_roles(), advantage=PairAdvantage(), tokens_per_pass=1)
    experience = with_rewards(data.collect(), [1.0, 0, 0, 0] * 3 + [1.0] * 4)
    parts = list(data.splitter.parts(experience, 2))
    assert [part.n_groups for part in parts] == [2, 1]
    assert [part.share for part in parts] == pytest.approx([2 / 3, 1 / 3])
    for part in parts:
        assert all(len(batch.advantages) == 2 for batch in part.batches)
        assert {batch.n_pairs for batch in part.batches} == {3}


def test_a_part_without_any_whole_pair_counts_no_prompts():
    data = make_datamodule(make_roles(), advantage=PairAdvantage(drop_ties=False), mask_truncated=True)
    experience = data.collect()
    # of the last two pairs one side alone has ended, and the first two are whole
    has_eos = torch.tensor([True] * 8 + [True, False, True, True] * 2)
    experience = replace(with_rewards(experience, [1.0, 0, 0.5, 0.5] * 4), has_eos=has_eos)
    parts = list(data.splitter.parts(experience, 2))
    assert [part.n_groups for part in parts] == [2, 0]
    assert [part.share for part in parts] == [1.0, 0.0]
    assert any(bool(batch.loss_weight.any()) for batch in parts[1].batches)


def test_groups_that_count_nothing_are_not_counted_in_a_part():
    data = make_datamodule(make_roles(), advantage=GroupAdvantage("dapo", filter_zero_std_groups=True))
    experience = with_rewards(data.collect(), [1.0, 0, 0, 0] + [1.0] * 8 + [0, 1.0, 1.0, 1.0])
    assert [part.n_groups for part in data.splitter.parts(experience, 2)] == [1, 1]
    assert [part.n_groups for part in data.splitter.parts(experience, 4)] == [1, 0, 0, 1]
    assert [part.share for part in data.splitter.parts(experience, 4)] == [0.5, 0, 0, 0.5]
    assert [part.n_prompts for part in data.splitter.parts(experience, 4)] == [1, 1, 1, 1]
