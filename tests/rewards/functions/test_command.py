import sys

import pytest

from lit_rlkv.rewards import Command
from tests.rewards.asking import opened, score

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
