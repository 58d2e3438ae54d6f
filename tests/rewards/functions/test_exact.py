import pytest

from lit_rlkv.rewards import ExactMatch
from lit_rlkv.types import Problem
from tests.rewards.asking import score


@pytest.mark.parametrize(
    ("options", "completion", "expected"),
    [
        ({}, " Paris\n", 1.0),
        ({}, "paris", 0.0),
        ({}, "It is Paris", 0.0),
        ({"ignore_case": True}, "PARIS", 1.0),
        ({"answer_after": "####"}, "Rome #### Paris", 1.0),
        ({"answer_after": "####"}, "#### Paris #### Rome", 0.0),
        ({"answer_after": "####"}, "Paris", 0.0),
    ],
)
def test_the_final_answer_must_be_the_reference(options, completion, expected):
    assert score(ExactMatch(**options), completion, "Paris") == expected


def test_a_problem_without_an_answer_is_refused():
    ExactMatch().check(Problem("?", "", "x"))
    with pytest.raises(ValueError, match=r"no answer to compare with; set task\.answer_column"):
        ExactMatch().check(Problem("?", "", ""))


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_must_be_finite(weight):
    with pytest.raises(ValueError, match="is no weight; give a finite number"):
        ExactMatch(weight=weight)
