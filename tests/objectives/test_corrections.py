import math

import pytest
import torch
from torch import Tensor

from lit_rlkv.objectives.corrections import ISWeights, WeightFn, masked, sparse_rl, truncated, unweighted

# π_old/μ of two sequences; the second one ends with a column of padding.
RATIOS = torch.tensor([[0.4, 0.5, 1.0, 3.0], [1.0, 1.5, 2.0, 1.0]])
IS_ACTION = torch.tensor([[True, True, True, True], [True, True, True, False]])
ALL = [unweighted, truncated, masked, sparse_rl]


def weigh(function: WeightFn, ratios: Tensor = RATIOS) -> ISWeights:
    return function(ratios.log(), IS_ACTION)


def at_actions(weights: ISWeights) -> list[float]:
    return weights.weight[IS_ACTION].tolist()


def test_without_a_correction_every_action_weighs_one():
    weights = weigh(unweighted)
    assert at_actions(weights) == [1.0] * 7
    assert torch.equal(weights.is_counted, IS_ACTION)


def test_truncated_importance_sampling_caps_the_ratio():
    assert at_actions(weigh(truncated)) == pytest.approx([0.4, 0.5, 1.0, 2.0, 1.0, 1.5, 2.0])
    assert at_actions(truncated_at_one_and_a_half()) == pytest.approx([0.4, 0.5, 1.0, 1.5, 1.0, 1.5, 1.5])


def truncated_at_one_and_a_half() -> ISWeights:
    return truncated(RATIOS.log(), IS_ACTION, cap=1.5)


def test_masked_importance_sampling_drops_the_ratios_outside_but_counts_their_tokens():
    ratios = RATIOS.clone()
    ratios[0, 1], ratios[1, 2] = 0.51, 1.99  # clear of the bounds 0.5 and 2, where rounding decides
    weights = weigh(masked, ratios)
    assert at_actions(weights) == pytest.approx([0.0, 0.51, 1.0, 0.0, 1.0, 1.5, 1.99])
    assert torch.equal(weights.is_counted, IS_ACTION)


def test_sparse_rl_drops_tokens_outside_and_normalises_the_rest():
    ratios = RATIOS.clone()
    ratios[0, 1], ratios[1, 1] = 0.6, 1.4
    weights = weigh(sparse_rl, ratios)
    # Left are 0.6 and 1 of the first and 1 and 1.4 of the second sequence: mean 1.
    expected = [[False, True, True, False], [True, True, False, False]]
    assert weights.is_counted.tolist() == expected
    assert weights.weight[weights.is_counted].tolist() == pytest.approx([0.6, 1.0, 1.0, 1.4])
    ratios[0, 2] = 0.6  # now 0.6, 0.6, 1, 1.4: mean 0.9
    weights = weigh(sparse_rl, ratios)
    assert weights.weight[weights.is_counted].tolist() == pytest.approx(
        [0.6 / 0.9, 0.6 / 0.9, 1 / 0.9, 1.4 / 0.9]
    )
    assert (weights.weight[~weights.is_counted] == 0).all()


def test_sparse_rl_vetoes_a_whole_sequence_for_one_token_that_the_learner_would_never_write():
    ratios = RATIOS.clone()
    ratios[0, 0] = 0.9e-4
    weights = weigh(sparse_rl, ratios)
    assert not weights.is_counted[0].any()
    assert weights.is_counted[1, 0]
    ratios[0, 0] = 1.1e-4  # above the veto the token alone is dropped
    assert weigh(sparse_rl, ratios).is_counted[0].tolist() == [False, True, True, False]


def test_padding_cannot_veto_a_sequence():
    ratios = RATIOS.clone()
    ratios[1, 3] = 1e-9
    assert weigh(sparse_rl, ratios).is_counted[1, 0]


def test_sparse_rl_with_nothing_left_weighs_nothing():
    weights = weigh(sparse_rl, torch.full_like(RATIOS, 1e-6))
    assert not weights.is_counted.any()
    assert (weights.weight == 0).all()


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_values_outside_the_response_mask_do_not_matter(function: WeightFn, junk: float):
    log_ratio = RATIOS.log()
    expected = function(log_ratio, IS_ACTION)
    actual = function(log_ratio.masked_fill(~IS_ACTION, junk), IS_ACTION)
    assert torch.equal(actual.weight[IS_ACTION], expected.weight[IS_ACTION])
    assert actual.weight.isfinite().all()
    assert torch.equal(actual.is_counted, expected.is_counted)


@pytest.mark.parametrize("function", ALL)
def test_equal_policies_weigh_one(function: WeightFn):
    assert at_actions(weigh(function, torch.ones_like(RATIOS))) == [1.0] * 7


@pytest.mark.parametrize("function", ALL)
def test_a_huge_ratio_gives_no_infinite_weight(function: WeightFn):
    log_ratio = RATIOS.log()
    log_ratio[0, 3] = 1000.0
    assert function(log_ratio, IS_ACTION).weight.isfinite().all()
