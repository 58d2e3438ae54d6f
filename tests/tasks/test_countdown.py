"""Countdown by hand."""

import random

import pytest

from lit_rlkv.tasks import Countdown
from lit_rlkv.types import Problem

PROBLEM = Problem("25,4,3>63:", "25-4=21,21*3=63", "63")


@pytest.mark.parametrize("completion", ["25-4=21,21*3=63", "25-4=21,3*21=63", "25*3=75,75-4=71"])
def test_any_valid_way_to_the_target_counts(completion):
    target = completion.rpartition("=")[2]
    assert Countdown().score(Problem(f"25,4,3>{target}:", "", target), completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "63",
        "63=63",
        "60+3=63",  # 60 is not on the table
        "21*3=63",  # nor is 21 before it is made
        "25-4=21,21*3=63,",
        "25-4=21,21*4=84",  # true, but 4 is gone
        "25-4=21,21+21=42,42+21=63",  # one 21 used three times
        "25-4=21,21*3=63,63-3=60",  # 3 is gone, and 60 is no target
        "25*3=63",  # false arithmetic
        "25-4=21,21*3=063",
        "025-4=21,21*3=63",
        "25-4=21;21*3=63",
        "(25-4)*3=63",
        "25-4=21,21*3=63\n",
        "25-4=21,3-21=-18",
    ],
)
def test_a_false_or_forbidden_step_scores_zero(completion):
    assert Countdown().score(PROBLEM, completion) == 0.0


def test_a_number_given_twice_may_be_used_twice():
    assert Countdown().score(Problem("4,4,3>16:", "", "16"), "4*4=16") == 1.0
    assert Countdown().score(Problem("4,3,3>16:", "", "16"), "4*4=16") == 0.0


def test_an_enormous_number_is_wrong_rather_than_an_error():
    assert Countdown().score(PROBLEM, f"{'9' * 5000}+4={'9' * 5000}") == 0.0
    assert Countdown().score(PROBLEM, f"25+4={'9' * 5000}") == 0.0


def test_sampled_solutions_stay_in_range_and_use_every_number():
    task = Countdown(n_numbers=4, max_number=12, max_target=60)
    for seed in range(100):
        problem = task.sample(random.Random(seed))
        given = [int(number) for number in problem.prompt.partition(">")[0].split(",")]
        results = [int(step.partition("=")[2]) for step in problem.solution.split(",")]
        assert len(given) == 4
        assert all(1 <= number <= 12 for number in given)
        assert len(results) == 3
        assert all(1 <= result <= 60 for result in results)


def test_a_corruption_misses_the_target_or_claims_it_falsely():
    # Last step 21*3=63: by + it is 24, by - it is 18.
    rejected = {Countdown().corrupt(PROBLEM, random.Random(seed)) for seed in range(100)}
    assert rejected == {f"25-4=21,{last}" for last in ("21+3=24", "21-3=18", "21+3=63", "21-3=63")}
