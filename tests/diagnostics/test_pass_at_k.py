from itertools import combinations

import pytest

from lit_rlkv.diagnostics.pass_at_k import pass_at_k


@pytest.mark.parametrize(
    ("n_samples", "n_right", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the right one
        (5, 2, 3, 9 / 10),  # of the 10 triples only the one of the three wrong ones fails
        (5, 2, 4, 1.0),  # there are not 4 wrong ones
        (5, 0, 5, 0.0),
        (200, 1, 100, 1 / 2),  # C(200, 100) has 59 digits
    ],
)
def test_the_estimate_matches_hand_arithmetic(n_samples, n_right, k, expected):
    assert pass_at_k(n_samples, n_right, k) == expected


def test_it_is_the_share_of_sets_with_a_right_sample_and_not_a_power_of_the_accuracy():
    is_right = [True, True, False, False, False, False]
    sets = list(combinations(is_right, 3))
    share = sum(any(one) for one in sets) / len(sets)
    assert pass_at_k(6, 2, 3) == pytest.approx(share, abs=1e-15)
    plug_in = 1 - (1 - 2 / 6) ** 3
    assert abs(plug_in - share) > 0.05


def test_it_is_unbiased_where_the_plug_in_estimate_is_not():
    # Three samples, each right with chance 1/4: pass@2 is 1 - (3/4)^2 = 7/16.
    chances = [27 / 64, 27 / 64, 9 / 64, 1 / 64]
    expected = sum(p * pass_at_k(3, c, 2) for c, p in enumerate(chances))
    plug_in = sum(p * (1 - (1 - c / 3) ** 2) for c, p in enumerate(chances))
    assert expected == pytest.approx(7 / 16, abs=1e-15)
    assert plug_in < 7 / 16 - 0.05


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((4, 1, 5), "pass@5 cannot be estimated from 4 samples; give k from 1"),
        ((4, 1, 0), "pass@0 cannot be estimated"),
        ((4, 5, 2), "n_right=5 of n_samples=4 cannot be"),
        ((4, -1, 2), "n_right=-1 of n_samples=4 cannot be"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        pass_at_k(*arguments)
