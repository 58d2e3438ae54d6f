"""Recall and sorting by hand."""

import random

import pytest

from lit_rlkv.tasks import Recall, Sorting
from lit_rlkv.types import Problem

PAIRS = Problem("a4;k7;c1;k?a?", "k7;a4", "k7;a4")


@pytest.mark.parametrize(
    "completion", ["a4;k7", "k7", "k7;a4;c1", "k7;a4;", "k7;a1", "7;4", "a4;k7;c1;k7;a4"]
)
def test_only_the_pairs_asked_for_in_order_score(completion):
    assert Recall().score(PAIRS, "k7;a4") == 1.0
    assert Recall().score(PAIRS, completion) == 0.0


def test_a_sampled_listing_holds_the_answer_to_every_question():
    problem = Recall(n_pairs=30, n_queries=4, value_digits=2).sample(random.Random(3))
    *listed, questions = problem.prompt.split(";")
    pairs = {pair[:2]: pair[2:] for pair in listed}
    asked = questions.removesuffix("?").split("?")
    assert len(pairs) == 30
    assert len(set(asked)) == 4
    assert all(len(value) == 2 for value in pairs.values())
    assert problem.answer == ";".join(f"{key}{pairs[key]}" for key in asked)


def test_keys_are_single_letters_until_the_alphabet_is_used_up():
    assert len(Recall(n_pairs=26).sample(random.Random(0)).prompt.partition(";")[0]) == 2
    assert len(Recall(n_pairs=27).sample(random.Random(0)).prompt.partition(";")[0]) == 3


def test_a_corruption_confuses_two_listed_pairs():
    # Wrong values for k are 4 and 1, for a they are 7 and 1.
    rejected = {Recall().corrupt(PAIRS, random.Random(seed)) for seed in range(100)}
    assert rejected == {"k4;a4", "k1;a4", "k7;a7", "k7;a1"}


def test_a_corruption_invents_a_value_where_all_pairs_agree():
    problem = Problem("a4;b4;a?", "a4", "a4")
    rejected = {Recall().corrupt(problem, random.Random(seed)) for seed in range(200)}
    assert rejected == {f"a{value}" for value in range(10) if value != 4}


# Smallest of 5,2,9,1 first: 1 | 5,2,9; then 2 | 5,9; then 5 | 9.
NUMBERS = Problem("5,2,9,1>", "1,5,2,9;1,2,5,9;1,2,5,9", "1,2,5,9")


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


@pytest.mark.parametrize("completion", [NUMBERS.solution, "1,2,5,9", "9,9;1,2,5,9"])
def test_only_the_last_list_counts(completion):
    assert Sorting().score(NUMBERS, completion) == 1.0


@pytest.mark.parametrize(
    "completion", ["1,2,5", "1,2,5,9,9", "1,2,5,9;", "1,2,5,9;1,2,9,5", "1,2,5,09", "0,1,2,5,9", "1;2;5;9"]
)
def test_anything_but_lists_ending_in_the_sorted_one_scores_zero(completion):
    assert Sorting().score(NUMBERS, completion) == 0.0


def test_a_corruption_takes_the_largest_for_the_smallest_once():
    # At the first, second or third selection the largest number left, always 9, is taken.
    rejected = {Sorting().corrupt(NUMBERS, random.Random(seed)) for seed in range(50)}
    assert rejected == {
        "9,5,2,1;9,1,5,2;9,1,2,5",
        "1,5,2,9;1,9,5,2;1,9,2,5",
        "1,5,2,9;1,2,5,9;1,2,9,5",
    }


def test_numbers_are_never_all_equal():
    tasks = [Sorting(n_items=2, max_value=1).sample(random.Random(seed)).prompt for seed in range(100)]
    assert set(tasks) == {"0,1>", "1,0>"}
