import pytest

from lit_rlkv.evaluation.estimates import estimate
from lit_rlkv.evaluation.evaluator import Sample


def samples(scores_by_problem, n_tokens=3):
    return [
        Sample("dense", problem, j, f"{problem}=", "7", "7", n_tokens + problem, score)
        for problem, scores in enumerate(scores_by_problem)
        for j, score in enumerate(scores)
    ]


def found_in(given, ks, **changes):
    return estimate(given, ks, **{"level": 0.9, "n_resamples": 500, "seed": 0} | changes)


def test_means_are_over_problems():
    # pass@1 is 0, 1/4 and 1; pass@2 is 0, 1/2 and 1
    found = found_in(samples([[0.0] * 4, [0.0, 1.0, 0.0, 0.0], [1.0] * 4]), [1, 2])
    assert found.pass_at_k[1].value == pytest.approx(1.25 / 3)
    assert found.pass_at_k[2].value == pytest.approx(1.5 / 3)
    assert found.accuracy == found.pass_at_k[1]
    assert found.mean_length.value == pytest.approx(4.0)


def test_the_order_of_the_samples_does_not_matter():
    given = samples([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert found_in(given[::-1], [1, 2]) == found_in(given, [1, 2])


def test_a_partial_score_counts_for_the_accuracy_and_not_as_right():
    found = found_in(samples([[0.5, 0.5], [1.0, 0.5]]), [1, 2])
    assert found.accuracy.value == pytest.approx(0.625)
    assert found.pass_at_k[1].value == pytest.approx(0.25)
    assert found.pass_at_k[2].value == pytest.approx(0.5)


def test_many_samples_of_few_problems_do_not_narrow_the_interval():
    few, many = (found_in(samples([[0.0] * n, [1.0] * n]), [1]) for n in (1, 100))
    assert many.accuracy == few.accuracy
    assert few.accuracy.high - few.accuracy.low == 1.0


def test_more_than_the_samples_of_a_problem_is_refused():
    with pytest.raises(ValueError, match="pass@3 cannot be estimated from 2 samples"):
        found_in(samples([[0.0, 1.0]]), [3])
