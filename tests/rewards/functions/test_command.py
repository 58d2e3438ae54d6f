import os
import signal
import subprocess
import sys

import pytest

from lit_rlkv.rewards import Command
from lit_rlkv.rewards.isolated import supervisor
from tests.rewards.asking import opened, score
from tests.rewards.running import is_running, wait_until

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


def test_nothing_that_is_written_is_run(argv, tmp_path):
    text = f"$(touch {tmp_path / 'made'}); touch {tmp_path / 'made'} #"
    assert score(Command(argv=argv), text, level=0) == len(text)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("fail", "it ended with status 1: no model loaded"),
        ("hang", r"no answer within 1 seconds"),
        ("nan", "it answered nan, which is no finite number"),
        ("words", "it wrote 'great', which is no number"),
    ],
)
def test_whatever_goes_wrong_is_said(argv, completion, says):
    with pytest.raises(Exception, match=says):
        score(Command(argv=argv, timeout_s=1), completion, level=0)


def test_a_failure_is_tried_again(tmp_path):
    (tmp_path / "second.sh").write_text(
        f"test -e {tmp_path / 'done'} && echo 1 || {{ touch {tmp_path / 'done'}; exit 2; }}\n"
    )
    assert score(Command(argv=["sh", str(tmp_path / "second.sh")], retries=1), "") == 1.0
    (tmp_path / "done").unlink()
    with pytest.raises(RuntimeError, match="it ended with status 2"):
        score(Command(argv=["sh", str(tmp_path / "second.sh")]), "")


def test_a_schedulers_signal_does_not_part_a_program_from_who_waits_for_it():
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


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("sh score.sh", "is no list of a program and its arguments"),
        ([], "is no list of a program and its arguments"),
        ([sys.executable, 3], "is no list of a program and its arguments"),
        (["no-such-program"], "there is no program 'no-such-program'; give its path, or install it"),
    ],
)
def test_a_line_for_a_shell_or_an_unknown_program_is_refused(argv, says):
    with pytest.raises(ValueError, match=says):
        Command(argv=argv)


def test_closing_ends_programs_under_way(argv):
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
PARENT = """
import sys
from lit_rlkv.rewards import Command
from lit_rlkv.rewards.isolated import supervisor
Command(argv=sys.argv[1:], timeout_s=60).open().submit({"completion": ""}).result()
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_what_a_program_leaves_in_the_background_ends_with_it(tmp_path):
    argv = [sys.executable, "-S", "-c", BACKGROUND, str(tmp_path / "pid")]
    assert score(Command(argv=argv, timeout_s=30), "") == 1.0
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_program_and_what_it_started_end_at_the_time_out(tmp_path):
    place = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        score(Command(argv=[sys.executable, "-S", "-c", BACKGROUND, str(place), "wait"], timeout_s=2), "")
    assert wait_until(lambda: not is_running(int(place.read_text())))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_program_ends_with_a_run_that_is_killed(tmp_path):
    place = tmp_path / "pid"
    argv = [sys.executable, "-S", "-c", BACKGROUND, str(place), "wait"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *argv])
    assert wait_until(lambda: place.exists() and place.read_text())
    program = int(place.read_text())
    assert is_running(program)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_running(program))


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    (tmp_path / "score").write_text("neither a script nor a program")
    (tmp_path / "score").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"it ended with status 1: cannot start .*: Exec format error"):
        score(Command(argv=[str(tmp_path / "score")]), "")
