import logging
import threading

import torch

from lit_rlkv.rewards import ExactMatch, RewardManager
from lit_rlkv.types import Problem
from tests.rewards.helpers import InThreads

PROBLEMS = [Problem("?", "", str(n)) for n in range(4)]


def test_every_function_scores_every_completion():
    with RewardManager(
        {"right": ExactMatch(), "length": InThreads(ask=lambda q: len(q["completion"]))}
    ) as manager:
        answers = manager.ask(PROBLEMS, ["0", "22", "2", "333"]).collect()
    assert answers.scores["right"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert answers.scores["length"].tolist() == [1.0, 2.0, 1.0, 3.0]
    assert answers.errors == {}


def test_scores_do_not_depend_on_the_order_of_answers():
    is_free = [threading.Event() for _ in range(4)]

    def last_first(question):
        n = int(question["answer"])
        assert is_free[n].wait(10)
        if n > 0:
            is_free[n - 1].set()
        return 10 + n

    def sequential(question):
        return 10 + int(question["answer"])

    with RewardManager(
        {"late": InThreads(ask=last_first), "one": InThreads(ask=sequential, n_workers=1)}
    ) as manager:
        asked = manager.ask(PROBLEMS, [""] * 4)
        is_free[3].set()
        answers = asked.collect()
    assert answers.scores["late"].tolist() == [10.0, 11.0, 12.0, 13.0]
    assert torch.equal(answers.scores["late"], answers.scores["one"])


def test_completions_may_be_added_in_parts_and_in_any_order():
    def score(question):
        if question["answer"] in "12":
            raise RuntimeError(f"no {question['answer']}")
        return 10 * int(question["answer"]) + len(question["completion"])

    with RewardManager({"odd": InThreads(ask=score)}) as manager:
        whole = manager.ask(PROBLEMS, ["a", "bb", "ccc", "dddd"]).collect()
        pending = manager.begin(PROBLEMS)
        pending.add([3, 2], ["dddd", "ccc"])
        pending.add([0], ["a"])
        pending.add([1], ["bb"])
        parts = pending.collect()
    assert parts.scores["odd"][[0, 3]].tolist() == whole.scores["odd"][[0, 3]].tolist() == [1.0, 34.0]
    assert parts.scores["odd"].isnan().tolist() == [False, True, True, False]
    assert parts.errors == whole.errors == {"odd": "no 1"}  # the first of the batch, not of those added


def test_a_failure_scores_nan_and_warns_once(caplog):
    def sometimes_fails(question):
        if question["answer"] in "12":
            raise RuntimeError(f"no {question['answer']}")
        return 1

    with RewardManager({"odd": InThreads(ask=sometimes_fails)}) as manager, caplog.at_level(logging.WARNING):
        for _ in range(2):
            answers = manager.ask(PROBLEMS, [""] * 4).collect()
    assert answers.scores["odd"].isnan().tolist() == [False, True, True, False]
    assert answers.errors == {"odd": "no 1"}
    (record,) = caplog.records
    assert "reward.functions.odd failed: no 1; responses without a score are left out" in record.getMessage()


def test_control_characters_of_an_error_are_removed(caplog):
    def parroting(question):
        raise RuntimeError("no \x1b[2Jtext\r\n" + "x" * 1000)

    with RewardManager({"odd": InThreads(ask=parroting)}) as manager, caplog.at_level(logging.WARNING):
        errors = manager.ask(PROBLEMS, [""] * 4).collect().errors
    assert errors == {"odd": "no  [2Jtext  " + "x" * 287}  # 13 characters before
    assert caplog.records[0].getMessage().isprintable()


def test_only_the_named_functions_are_asked():
    asked = []
    with RewardManager({"right": ExactMatch(), "other": InThreads(ask=asked.append)}) as manager:
        assert manager.ask(PROBLEMS, ["0"] * 4, ["right"]).collect().scores.keys() == {"right"}
    assert asked == []


def test_a_closed_manager_can_be_used_again():
    manager = RewardManager({"length": InThreads(ask=lambda q: len(q["completion"]))})
    for _ in range(2):
        assert manager.ask(PROBLEMS[:1], ["abc"]).collect().scores["length"].tolist() == [3.0]
        manager.close()


def test_threads_end_with_the_manager():
    before = threading.active_count()
    manager = RewardManager({"length": InThreads(ask=lambda q: 0)})
    manager.ask(PROBLEMS, [""] * 4).collect()
    assert threading.active_count() > before
    manager.close()
    assert threading.active_count() == before
