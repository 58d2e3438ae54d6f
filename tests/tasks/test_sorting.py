"""Sorting by hand."""

import random

import pytest

from lit_rlkv.tasks import Sorting
from lit_rlkv.types import Problem

# Smallest of 5,2,9,1 first: 1 | 5,2,9; then 2 | 5,9; then 5 | 9.
PROBLEM = Problem("5,2,9,1>", "1,5,2,9;1,2,5,9;1,2,5,9", "1,2,5,9")


def test_sampled_solutions_move_the_next_smallest_forward():
    for seed in range(50):
        problem = Sorting(n_items=5, max_value=20).sample(random.Random(seed))
        previous = [int(number) for number in problem.prompt.removesuffix(">").split(",")]
        for place, line in enumerate(problem.solution.split(";")):
            current = [int(number) for number in line.split(",")]
            rest = previous[place:]
            rest.remove(min(rest))
            assert current == [*previous[:place], min(previous[place:]), *rest]
            previous = current
        assert previous == sorted(previous)


@pytest.mark.parametrize("completion", [PROBLEM.solution, "1,2,5,9", "9,9;1,2,5,9"])
def test_only_the_last_list_counts(completion):
    assert Sorting().score(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion", ["1,2,5", "1,2,5,9,9", "1,2,5,9;", "1,2,5,9;1,2,9,5", "1,2,5,09", "0,1,2,5,9", "1;2;5;9"]
)
def test_anything_but_lists_ending_in_the_sorted_one_scores_zero(completion):
    assert Sorting().score(PROBLEM, completion) == 0.0


def test_a_corruption_takes_the_largest_for_the_smallest_once():
    # At the first, second or third selection the largest number left, always 9, is taken.
    rejected = {Sorting().corrupt(PROBLEM, random.Random(seed)) for seed in range(50)}
    assert rejected == {
        "9,5,2,1;9,1,5,2;9,1,2,5",
        "1,5,2,9;1,9,5,2;1,9,2,5",
        "1,5,2,9;1,2,5,9;1,2,9,5",
    }


def test_numbers_are_never_all_equal():
    tasks = [Sorting(n_items=2, max_value=1).sample(random.Random(seed)).prompt for seed in range(100)]
    assert set(tasks) == {"0,1>", "1,0>"}
