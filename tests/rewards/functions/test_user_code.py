"""Reward functions that run a user's own code."""

import os
import signal
import subprocess
import sys

import pytest

from lit_rlkv.rewards import Command, PythonFunction
from lit_rlkv.rewards.graders import MAX_BYTES
from lit_rlkv.rewards.isolated import supervisor
from lit_rlkv.types import Message
from tests.forks import start
from tests.rewards.helpers import is_running, opened, score, wait_until

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
        (lambda: Command(argv="sh score.sh"), "argv must be a list of a program and its arguments"),
        (lambda: Command(argv=[]), "argv must be a list of a program and its arguments"),
        (lambda: Command(argv=[sys.executable, 3]), "argv must be a list of a program and its arguments"),
        (lambda: Command(argv=["no-such-program"]), "there is no executable program 'no-such-program'"),
    ],
)
def test_a_missing_file_a_shell_line_and_an_unknown_program_are_refused(make, says):
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


PROGRAM = """
import json, sys, time
question = json.load(sys.stdin)
completion = question["completion"]
if completion == "fail":
    sys.exit("no model loaded")
if completion == "hang":
    time.sleep(60)
print({"nan": "nan", "words": "great"}.get(completion, len(completion) + question["level"]))
"""


@pytest.fixture
def argv(tmp_path):
    (tmp_path / "score.py").write_text(PROGRAM)
    return [sys.executable, "-S", str(tmp_path / "score.py")]


def test_a_program_reads_the_question_and_writes_a_number(argv):
    assert score(Command(argv=argv), "four", level=0.5) == 4.5


def test_a_completion_is_never_run(argv, tmp_path):
    text = f"$(touch {tmp_path / 'made'}); touch {tmp_path / 'made'} #"
    assert score(Command(argv=argv), text, level=0) == len(text)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("fail", "the program ended with status 1: no model loaded"),
        ("hang", r"no answer within 1 seconds"),
        ("nan", r"the score must be a finite number of size at most 1e\+06, got nan"),
        ("words", "the program must write a number, got 'great'"),
    ],
)
def test_errors_of_a_program_are_raised(argv, completion, says):
    with pytest.raises(Exception, match=says):
        score(Command(argv=argv, timeout_s=1), completion, level=0)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_that_writes_too_much_is_killed(tmp_path, stream):
    endless = f"""
import os, sys
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
while True:
    sys.{stream}.write("y\\n" * 1000)
"""
    with pytest.raises(RuntimeError, match=f"the program must write at most {MAX_BYTES} bytes"):
        score(Command(argv=[sys.executable, "-S", "-c", endless], timeout_s=20, retries=1), "")
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_all_output_up_to_the_bound_is_read():
    program = [sys.executable, "-S", "-c", "import sys; sys.stdout.write('1'.rjust(int(sys.argv[1])))"]
    assert score(Command(argv=[*program, str(MAX_BYTES)]), "") == 1.0
    with pytest.raises(RuntimeError, match="the program must write at most"):
        score(Command(argv=[*program, str(MAX_BYTES + 1)]), "")


def test_a_question_may_be_longer_than_a_pipe_and_need_not_be_read(argv):
    assert score(Command(argv=argv), "x" * 900_000, level=0) == 900_000
    assert score(Command(argv=["echo", "1"]), "x" * 900_000) == 1.0


def test_a_failure_is_tried_again(tmp_path):
    (tmp_path / "second.sh").write_text(
        f"test -e {tmp_path / 'done'} && echo 1 || {{ touch {tmp_path / 'done'}; exit 2; }}\n"
    )
    assert score(Command(argv=["sh", str(tmp_path / "second.sh")], retries=1), "") == 1.0
    (tmp_path / "done").unlink()
    with pytest.raises(RuntimeError, match="the program ended with status 2"):
        score(Command(argv=["sh", str(tmp_path / "second.sh")]), "")


def test_the_supervisor_survives_sigterm():
    read, write = os.pipe()
    program = ["sh", "-c", "trap '' TERM; echo on; sleep 1; echo done"]
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, str(read), *program],
        stdout=subprocess.PIPE, pass_fds=[read], text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0] == "done\n"
    assert process.returncode == 0
    os.close(read)
    os.close(write)


def test_a_program_of_this_folder_needs_its_path_and_the_right_to_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "score.sh"
    program.write_text("#!/bin/sh\necho 1\n")
    with pytest.raises(ValueError, match=r"no executable program '\./score\.sh'.*chmod \+x it"):
        Command(argv=["./score.sh"])
    program.chmod(0o755)
    with pytest.raises(ValueError, match=r"no executable program 'score\.sh' in PATH; give its path"):
        Command(argv=["score.sh"])
    Command(argv=["./score.sh"])


def test_close_ends_running_programs(argv):
    with opened(Command(argv=argv, timeout_s=60)):
        pass
    grader = Command(argv=argv, timeout_s=60).open()
    future = grader.submit({"completion": "hang", "level": 0})
    grader.close()
    assert future.cancelled() or future.exception(timeout=10) is not None


BACKGROUND = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(str(child.pid))
if len(sys.argv) > 2:
    child.wait()
print(1)
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_background_processes_end_with_their_program(tmp_path):
    argv = [sys.executable, "-S", "-c", BACKGROUND, str(tmp_path / "pid")]
    assert score(Command(argv=argv, timeout_s=30), "") == 1.0
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_timeout_ends_a_program_and_its_processes(tmp_path):
    place = tmp_path / "pid"
    with pytest.raises(RuntimeError, match="no answer within 2 seconds"):
        score(Command(argv=[sys.executable, "-S", "-c", BACKGROUND, str(place), "wait"], timeout_s=2), "")
    assert wait_until(lambda: not is_running(int(place.read_text())))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_program_ends_with_a_run_that_is_killed(tmp_path):
    place = tmp_path / "pid"
    argv = [sys.executable, "-S", "-c", BACKGROUND, str(place), "wait"]
    program = Command(argv=argv, timeout_s=60)
    parent = start(lambda: program.open().submit({"completion": ""}).result())
    assert wait_until(lambda: place.exists() and place.read_text())
    program = int(place.read_text())
    assert is_running(program)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_until(lambda: not is_running(program))


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    (tmp_path / "score").write_text("neither a script nor a program")
    (tmp_path / "score").chmod(0o755)
    with pytest.raises(
        RuntimeError, match=r"the program ended with status 1: cannot start .*: Exec format error"
    ):
        score(Command(argv=[str(tmp_path / "score")]), "")
