"""Recall by hand."""

import random

import pytest

from lit_rlkv.tasks import Recall
from lit_rlkv.types import Problem

PROBLEM = Problem("a4;k7;c1;k?a?", "k7;a4", "k7;a4")


@pytest.mark.parametrize(
    "completion", ["a4;k7", "k7", "k7;a4;c1", "k7;a4;", "k7;a1", "7;4", "a4;k7;c1;k7;a4"]
)
def test_only_the_pairs_asked_for_in_order_score(completion):
    assert Recall().score(PROBLEM, "k7;a4") == 1.0
    assert Recall().score(PROBLEM, completion) == 0.0


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
    rejected = {Recall().corrupt(PROBLEM, random.Random(seed)) for seed in range(100)}
    assert rejected == {"k4;a4", "k1;a4", "k7;a7", "k7;a1"}


def test_a_corruption_invents_a_value_where_all_pairs_agree():
    problem = Problem("a4;b4;a?", "a4", "a4")
    rejected = {Recall().corrupt(problem, random.Random(seed)) for seed in range(200)}
    assert rejected == {f"a{value}" for value in range(10) if value != 4}
