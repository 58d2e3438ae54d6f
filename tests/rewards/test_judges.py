import math
from functools import partial

import pytest
import torch

from lit_rlkv.rewards.judges import right_then_short, tournament
from lit_rlkv.types import Problem

SUM = Problem("2+2=", "4", "4")
PRODUCT = Problem("3*3=", "9", "9")


def ends_right(problem: Problem, completion: str) -> float:
    return float(completion.endswith(problem.answer))


def longer(problem: Problem, first: str, second: str) -> float:
    return float(len(first) - len(second))


judge = partial(right_then_short, verifier=ends_right)


def test_the_right_answer_wins_however_long_it_is():
    assert judge(SUM, "two and two are 4", "5") > 0
    assert judge(SUM, "5", "two and two are 4") < 0


def test_among_equally_right_answers_the_shorter_one_wins():
    assert judge(SUM, "4", "it is 4") > 0
    assert judge(SUM, "it is 4", "4") < 0
    assert judge(SUM, "it is 5", "5") < 0
    assert judge(SUM, "=4", "+4") == 0


def test_a_tournament_counts_wins_less_losses_in_each_group():
    completions = ["4", "5", "is 4", "is 5", "9", "9", "8", "8"]
    problems = [SUM] * 4 + [PRODUCT] * 4
    # 4 > is 4 > 5 > is 5; two pairs of equals: two wins and a tie, two losses and a tie
    expected = [3.0, -1.0, 1.0, -3.0, 2.0, 2.0, -2.0, -2.0]
    assert tournament(judge, problems, completions, 4).tolist() == expected


def test_a_group_is_judged_by_its_own_problem():
    completions = ["4", "9"] * 2
    assert tournament(judge, [SUM] * 2 + [PRODUCT] * 2, completions, 2).tolist() == [1.0, -1.0, -1.0, 1.0]


def test_the_size_of_a_verdict_does_not_count():
    scores = tournament(longer, [SUM] * 3, ["a" * 100, "aa", "a"], 3)
    assert scores.tolist() == [2.0, 0.0, -2.0]


def test_a_cycle_of_preferences_is_a_draw():
    beats = {("rock", "scissors"), ("scissors", "paper"), ("paper", "rock")}

    def game(problem: Problem, first: str, second: str) -> float:
        return float((first, second) in beats) - float((second, first) in beats)

    assert tournament(game, [SUM] * 3, ["rock", "paper", "scissors"], 3).tolist() == [0.0] * 3


def test_every_pair_of_a_group_is_asked_once():
    asked = []

    def note(problem: Problem, first: str, second: str) -> float:
        asked.append(first + second)
        return 0.0

    assert torch.equal(tournament(note, [SUM] * 6, list("abcdef"), 3), torch.zeros(6))
    assert asked == ["ab", "ac", "bc", "de", "df", "ef"]


def test_no_completions_have_no_scores():
    assert tournament(judge, [], [], 4).shape == (0,)


def test_incomplete_or_mixed_groups_are_refused():
    with pytest.raises(ValueError, match="equally many, got 1 and 2; give one problem for each completion"):
        tournament(judge, [SUM], ["4", "5"], 2)
    with pytest.raises(ValueError, match="must be a multiple of group_size=2, got 3"):
        tournament(judge, [SUM] * 3, ["4", "5", "6"], 2)
    with pytest.raises(ValueError, match="group_size must be at least 2, got 1"):
        tournament(judge, [SUM], ["4"], 1)
    with pytest.raises(ValueError, match="completions 2 to 3 must answer the same problem"):
        tournament(judge, [SUM, SUM, SUM, PRODUCT], ["4"] * 4, 2)


def test_a_judge_that_answers_nan_is_refused():
    with pytest.raises(ValueError, match="the judge must return a number, got NaN for completions 0 and 1"):
        tournament(lambda problem, first, second: math.nan, [SUM] * 2, ["4", "5"], 2)
