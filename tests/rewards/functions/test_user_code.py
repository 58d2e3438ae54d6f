"""Reward functions that run a user's own code."""

import pytest

from lit_rlkv.rewards import PythonFunction
from lit_rlkv.types import Message
from tests.rewards.helpers import opened

SOURCE = """
import sys
import time

from beside import LENGTH

n_calls = 0

def short(completion):
    print("what it prints harms nothing")
    return len(completion) < LENGTH

def fields(completion, prompt, answer, solution, level):
    return float((completion, prompt, answer, solution, level) == ("c", "p", "a", "s", [1, {"x": 2}]))

def chat(prompt):
    return float(prompt == [{"role": "user", "content": "hi"}])

def everything(**given):
    return len(given)

def counting(completion):
    global n_calls
    n_calls += 1
    return n_calls

def whimsical(completion):
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "hang":
        time.sleep(60)
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        import os
        os._exit(1)
    if completion == "large":
        return -1000001
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1"}.get(completion, 0.5)

async_score = whimsical
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("LENGTH = 3\n")
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path / "rewards.py"


def test_a_function_gets_the_fields_that_it_has_parameters_for(file):
    with opened(PythonFunction(path=f"{file}:short")) as ask:
        assert [ask("ab"), ask("abc")] == [1.0, 0.0]
    with opened(PythonFunction(path=f"{file}:fields")) as ask:
        assert ask("c", "a", prompt="p", solution="s", level=[1, {"x": 2}]) == 1.0
        assert ask("c", "a", prompt="p", solution="s", level=[1, {"x": 3}]) == 0.0
    with opened(PythonFunction(path=f"{file}:chat")) as ask:
        assert ask("", prompt=(Message("user", "hi"),)) == 1.0
    with opened(PythonFunction(path=f"{file}:everything")) as ask:
        assert ask("", level=1) == 5.0


def test_one_worker_answers_many_questions(file):
    with opened(PythonFunction(path=f"{file}:counting", n_workers=1)) as ask:
        assert [ask("") for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_function_answers_again_after_an_error(file):
    with opened(PythonFunction(path=f"{file}:whimsical", timeout_s=0.5, n_workers=1)) as ask:
        for completion, says in {
            "raise": r"KeyError: 'no such thing' \(rewards\.py, line 29\)",
            "hang": r"no answer within 0\.5 seconds",
            "exit": "SystemExit: 3",
            "die": "its process died in the middle of a question",
            "nan": r"the score must be a finite number of size at most 1e\+06, got nan",
            "inf": r"the score must be a finite number of size at most 1e\+06, got inf",
            "large": r"the score must be a finite number of size at most 1e\+06, got -1000001\.0",
            "none": "it returned None; return a number",
            "text": "it returned '1'; return a number",
        }.items():
            with pytest.raises(Exception, match=says):
                ask(completion)
            assert ask("fine") == 0.5


def test_a_parameter_without_a_column_is_named(file):
    with (
        opened(PythonFunction(path=f"{file}:fields")) as ask,
        pytest.raises(RuntimeError, match="missing 1 required positional argument: 'level'"),
    ):
        ask("c")


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PythonFunction(path="nowhere.py:score"), "there is no file 'nowhere.py'; give its path"),
        (lambda: PythonFunction(path="rewards.py"), "path must name a function as"),
        (lambda: PythonFunction(path=""), "path must name a function as"),
    ],
)
def test_a_missing_file_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def score(completion):\n    return 1\nraise RuntimeError('no key')\n", "RuntimeError: no key"),
        ("def score(:\n", "SyntaxError"),
        ("def other(completion):\n    return 1\n", "AttributeError: .* no attribute 'score'"),
    ],
)
def test_why_a_function_cannot_be_loaded_is_raised_every_time(tmp_path, source, says):
    (tmp_path / "rewards.py").write_text(source)
    with opened(PythonFunction(path=f"{tmp_path / 'rewards.py'}:score")) as ask:
        for _ in range(2):
            with pytest.raises(Exception, match=rf"cannot load score from .*rewards\.py: {says}"):
                ask("")
