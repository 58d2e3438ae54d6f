from dataclasses import replace

import pytest

from lit_rlkv.evaluation.estimates import estimate, pass_at_k
from lit_rlkv.evaluation.evaluator import ScoredResponse


def samples(scores_by_problem, n_tokens=3):
    return [
        ScoredResponse("dense", problem, j, f"{problem}=", "7", "7", n_tokens + problem, score, score)
        for problem, scores in enumerate(scores_by_problem)
        for j, score in enumerate(scores)
    ]


def found_in(given, ks, **changes):
    return estimate(given, ks, **{"level": 0.9} | changes)


def test_means_are_over_problems():
    # pass@1 is 0, 1/4 and 1; pass@2 is 0, 1/2 and 1
    found = found_in(samples([[0.0] * 4, [0.0, 1.0, 0.0, 0.0], [1.0] * 4]), [1, 2])
    assert found.pass_at_k[1].value == pytest.approx(1.25 / 3)
    assert found.pass_at_k[2].value == pytest.approx(1.5 / 3)
    assert found.accuracy == found.pass_at_k[1]
    assert found.mean_length.value == pytest.approx(4.0)


def test_a_partial_score_counts_for_the_reward_and_not_as_right():
    found = found_in(samples([[0.5, 0.5], [1.0, 0.5]]), [1, 2])
    assert found.accuracy.value == pytest.approx(0.25)
    assert found.reward.value == pytest.approx(0.625)
    assert found.pass_at_k[1].value == pytest.approx(0.25)
    assert found.pass_at_k[2].value == pytest.approx(0.5)


def test_what_is_not_known_is_none():
    (unknown,) = samples([[0.5]])
    found = found_in([replace(unknown, score=None, reward=None)], [])
    assert (found.accuracy, found.reward) == (None, None)
    # a failed reward is left out of the mean
    (failed, half) = samples([[0.0], [0.5]])
    assert found_in([replace(failed, reward=None), half], []).reward.value == 0.5


def test_rewards_have_the_interval_of_a_mean():
    found = found_in(samples([[-1.0], [3.0], [1.0]]), []).reward
    # s = 2, t = 2.919986 at 90 %
    assert (found.low, found.value, found.high) == pytest.approx((1 - 3.371709, 1, 1 + 3.371709), abs=1e-5)


def test_more_than_the_samples_of_a_problem_is_refused():
    with pytest.raises(ValueError, match="pass@3 cannot be estimated from 2 samples"):
        found_in(samples([[0.0, 1.0]]), [3])


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


def test_it_is_unbiased_where_the_plug_in_estimate_is_not():
    # Three samples, each right with chance 1/4: pass@2 is 1 - (3/4)^2 = 7/16.
    chances = [27 / 64, 27 / 64, 9 / 64, 1 / 64]
    expected = sum(p * pass_at_k(3, c, 2) for c, p in enumerate(chances))
    plug_in = sum(p * (1 - (1 - c / 3) ** 2) for c, p in enumerate(chances))
    assert expected == pytest.approx(7 / 16, abs=1e-15)
    assert plug_in < 7 / 16 - 0.05


@pytest.mark.parametrize(
    ("arguments", "key"),
    [((4, 1, 5), "pass@5"), ((4, 1, 0), "pass@0"), ((4, 5, 2), "n_right=5"), ((4, -1, 2), "n_right=-1")],
)
def test_invalid_sample_counts_are_refused(arguments, key):
    with pytest.raises(ValueError, match=key):
        pass_at_k(*arguments)
