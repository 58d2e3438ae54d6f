"""Worker processes: reused, replaced, and gone when they should be."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lit_rlkv.rewards.graders import Children, Refused

SOURCE = """
import os
import time

def pid(completion):
    return os.getpid()

def hang(completion):
    open(completion, "w").write(str(os.getpid()))
    while True:
        pass
"""
PARENT = """
import sys
from lit_rlkv.rewards.graders import Children
Children(sys.argv[1], "hang", {}, 60).ask({"completion": sys.argv[2]})
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path / "rewards.py"


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_worker_is_used_again_and_ends_when_it_is_closed(file):
    children = Children(str(file), "pid", {}, 5)
    first, second = (int(children.ask({"completion": ""})) for _ in range(2))
    assert first == second
    assert is_running(first)
    children.close()
    assert not is_running(first)
    with pytest.raises(Refused, match="the reward functions are closed"):
        children.ask({"completion": ""})


def test_a_worker_that_hangs_is_killed(file, tmp_path):
    children = Children(str(file), "hang", {}, 0.5)
    with pytest.raises(TimeoutError):
        children.ask({"completion": str(tmp_path / "pid")})
    assert not is_running(int((tmp_path / "pid").read_text()))
    children.close()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_worker_ends_with_a_parent_that_is_killed_while_it_hangs(file, tmp_path):
    place = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file), str(place)])
    assert wait_until(lambda: place.exists() and place.read_text())
    worker = int(place.read_text())
    assert is_running(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not is_running(worker))
