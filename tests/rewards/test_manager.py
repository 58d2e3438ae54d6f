import logging
import threading

import pytest
import torch

from lit_rlkv.rewards import ExactMatch, RewardManager
from lit_rlkv.types import Problem
from tests.rewards.threaded import InThreads

PROBLEMS = [Problem("?", "", str(n)) for n in range(4)]


def test_every_function_scores_every_completion():
    with RewardManager(
        {"right": ExactMatch(), "length": InThreads(ask=lambda q: len(q["completion"]))}
    ) as panel:
        answers = panel.ask(PROBLEMS, ["0", "22", "2", "333"]).collect()
    assert answers.scores["right"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert answers.scores["length"].tolist() == [1.0, 2.0, 1.0, 3.0]
    assert answers.errors == {}


def test_answers_do_not_depend_on_the_order_in_which_they_come():
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
    ) as panel:
        asked = panel.ask(PROBLEMS, [""] * 4)
        is_free[3].set()
        answers = asked.collect()
    assert answers.scores["late"].tolist() == [10.0, 11.0, 12.0, 13.0]
    assert torch.equal(answers.scores["late"], answers.scores["one"])


def test_a_failure_is_a_nan_and_is_said_once(caplog):
    def whimsical(question):
        if question["answer"] in "12":
            raise RuntimeError(f"no {question['answer']}")
        return 1

    with RewardManager({"odd": InThreads(ask=whimsical)}) as panel, caplog.at_level(logging.WARNING):
        for _ in range(2):
            answers = panel.ask(PROBLEMS, [""] * 4).collect()
    assert answers.scores["odd"].isnan().tolist() == [False, True, True, False]
    assert answers.errors == {"odd": "no 1"}
    (record,) = caplog.records
    assert "reward.functions.odd failed: no 1; such responses are left out" in record.getMessage()


def test_what_a_failure_repeats_cannot_speak_to_the_terminal(caplog):
    def parroting(question):
        raise RuntimeError("no \x1b[2Jtext\r\n" + "x" * 1000)

    with RewardManager({"odd": InThreads(ask=parroting)}) as panel, caplog.at_level(logging.WARNING):
        errors = panel.ask(PROBLEMS, [""] * 4).collect().errors
    assert errors == {"odd": "no  [2Jtext  " + "x" * 287}  # 13 characters before
    assert caplog.records[0].getMessage().isprintable()


def test_only_functions_that_are_named_are_asked():
    asked = []
    with RewardManager({"right": ExactMatch(), "other": InThreads(ask=asked.append)}) as panel:
        assert panel.ask(PROBLEMS, ["0"] * 4, ["right"]).collect().scores.keys() == {"right"}
    assert asked == []


def test_a_panel_that_was_closed_starts_anew():
    panel = RewardManager({"length": InThreads(ask=lambda q: len(q["completion"]))})
    for _ in range(2):
        assert panel.ask(PROBLEMS[:1], ["abc"]).collect().scores["length"].tolist() == [3.0]
        panel.close()


def test_threads_end_with_the_panel():
    before = threading.active_count()
    panel = RewardManager({"length": InThreads(ask=lambda q: 0)})
    panel.ask(PROBLEMS, [""] * 4).collect()
    assert threading.active_count() > before
    panel.close()
    assert threading.active_count() == before


def test_problems_and_completions_must_be_as_many():
    with pytest.raises(ValueError, match="4 problems for 1 completions"):
        RewardManager({}).ask(PROBLEMS, [""])
