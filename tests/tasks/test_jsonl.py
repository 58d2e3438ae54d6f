"""Problems from a file of JSON lines."""

import random

import pytest

from lit_rlkv.tasks import FiniteTask, JsonlTask
from lit_rlkv.types import Problem


def test_lines_become_problems_in_order(write):
    task = JsonlTask(
        write({"prompt": "2+2=", "answer": "4"}, "", {"prompt": "3+3=", "answer": " 6 ", "level": 1})
    )
    assert isinstance(task, FiniteTask)
    assert [task.at(index) for index in range(len(task))] == [
        Problem("2+2=", "4", "4"),
        Problem("3+3=", "6", "6"),
    ]
    assert [task.place(index).rpartition(":")[2] for index in range(len(task))] == ["1", "3"]
    assert task.sample(random.Random(0)) in (task.at(0), task.at(1))


def test_numbers_become_answers_as_json_writes_them(write):
    lines = [{"prompt": "?", "answer": answer} for answer in (2, -1.5, 72.0, 2**53 + 1)]
    task = JsonlTask(write(*lines))
    assert [task.at(index).answer for index in range(4)] == ["2", "-1.5", "72", "9007199254740993"]


def test_without_a_marker_the_whole_completion_is_the_answer(write):
    task = JsonlTask(write({"prompt": "2+2=", "answer": "4"}))
    assert task.score(task.at(0), " 4\n") == 1.0
    assert task.score(task.at(0), "is it 4") == 0.0
    assert task.score(task.at(0), "1 2 3 4") == 0.0


def test_with_a_marker_only_what_follows_the_last_one_counts(write):
    line = {"prompt": "2+2?", "answer": "4", "solution": "2 and 2 make 4.\n#### 4"}
    task = JsonlTask(write(line), answer_after="####")
    assert task.at(0).solution == "2 and 2 make 4.\n#### 4"
    assert task.score(task.at(0), "I say 5\n#### 5\nno, #### 4\n") == 1.0
    assert task.score(task.at(0), "#### 4 #### 5") == 0.0
    assert task.score(task.at(0), "#### 3 4") == 0.0
    assert task.score(task.at(0), "4") == 0.0


def test_a_missing_solution_becomes_marker_and_answer(write):
    task = JsonlTask(write({"prompt": "2+2?", "answer": "4"}), answer_after="####")
    assert task.at(0).solution == "#### 4"
    assert task.score(task.at(0), task.at(0).solution) == 1.0


@pytest.mark.parametrize("answer", ["4", "1999", "Paris", "x", "-", "∞"])
def test_a_corruption_changes_the_answer_and_nothing_before_it(write, answer):
    task = JsonlTask(
        write({"prompt": "?", "answer": answer, "solution": f"{answer} it is: {answer}"}), answer_after=":"
    )
    for seed in range(30):
        rejected = task.corrupt(task.at(0), random.Random(seed))
        assert rejected.startswith(f"{answer} it is: ")
        assert task.score(task.at(0), rejected) == 0.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "rows.jsonl:2: not JSON"),
        ([1, 2], "rows.jsonl:2: a row must be an object, got list"),
        ({"prompt": "1+1="}, "rows.jsonl:2: missing answer; each line needs prompt and answer"),
        ({}, "rows.jsonl:2: missing prompt, answer"),
        ({"prompt": "1+1=", "answer": None}, "rows.jsonl:2: answer must be text, got None"),
        ({"prompt": "1+1=", "answer": "2", "solution": None}, "rows.jsonl:2: solution must be text"),
        (
            {"prompt": "1+1=", "answer": "2", "solution": "3"},
            "rows.jsonl:2: the solution '3' must be the answer '2'",
        ),
        ({"prompt": "1+1=", "answer": ""}, "rows.jsonl:2: the answer is empty"),
        ({"prompt": " ", "answer": "2"}, "rows.jsonl:2: the prompt is empty"),
        ({"prompt": 3, "answer": "2"}, "rows.jsonl:2: prompt must be a text or chat messages, got 3"),
    ],
)
def test_a_bad_line_is_named(write, line, message):
    with pytest.raises(ValueError, match=message):
        JsonlTask(write({"prompt": "2+2=", "answer": "4"}, line))


def test_a_solution_without_the_marker_is_refused(write):
    path = write({"prompt": "1+1=", "answer": "2", "solution": "it is 2"})
    with pytest.raises(ValueError, match="must end in '####' and the answer '2'"):
        JsonlTask(path, answer_after="####")
