from lit_rlkv.evaluation.correctness import accuracy_of
from lit_rlkv.rewards import Numeric, RewardManager
from lit_rlkv.tasks import ChainSum
from lit_rlkv.types import Problem
from tests.rewards.threaded import InThreads

PROBLEMS = [Problem("7+3=", "7,10", "10")] * 3
COMPLETIONS = ["7,10", "it is 10", "7,11"]


def fails_on_words(question):
    return float("nan") if "it" in question["completion"] else 1.0


def test_the_task_says_what_is_right_unless_a_function_does():
    panel = RewardManager({"correct": Numeric()})
    assert accuracy_of(ChainSum(n_terms=2))(PROBLEMS, COMPLETIONS).tolist() == [1.0, 0.0, 0.0]
    assert accuracy_of(ChainSum(n_terms=2), panel)(PROBLEMS, COMPLETIONS).tolist() == [1.0, 0.0, 0.0]
    asked = accuracy_of(ChainSum(n_terms=2), panel, "correct")
    # 7,10 is a list of totals for the task, and no number for a function that reads numbers.
    assert asked(PROBLEMS, COMPLETIONS).tolist() == [0.0, 1.0, 0.0]


def test_where_the_function_fails_there_is_no_score():
    with RewardManager({"correct": InThreads(ask=fails_on_words)}) as panel:
        scores = accuracy_of(ChainSum(), panel, "correct")(PROBLEMS, COMPLETIONS)
    assert scores.nan_to_num(nan=-1.0).tolist() == [1.0, -1.0, 1.0]
