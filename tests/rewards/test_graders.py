"""Worker processes of reward functions."""

import gc
import os
import signal
import weakref

import pytest

from lit_rlkv.rewards import graders
from lit_rlkv.rewards.graders import GraderPool, NonRetryableError
from tests.forks import start
from tests.rewards.helpers import is_running, wait_until

SOURCE = """
import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time

def pid(completion):
    return os.getpid()

def gets_sigterm(completion):
    os.kill(os.getpid(), signal.SIGTERM)
    return 0.5

def wait(tell):
    tell.send(True)
    time.sleep(60)

def ends_others(completion):
    ready, tell = multiprocessing.Pipe()
    forked = multiprocessing.get_context("fork").Process(target=wait, args=(tell,))
    forked.start()
    ready.recv()
    program = subprocess.Popen(["sleep", "60"])
    for other in (forked, program):
        other.terminate()
    forked.join()
    return -forked.exitcode + (program.wait() == forked.exitcode) / 2

def raises_a_long_text(completion):
    raise ValueError("x" * 30_000_000)

def floods_the_pipe(completion):
    for pipe in range(3, 10):
        try:
            os.write(pipe, b"x" * 3_000_000)
        except OSError:
            pass

def keeps_the_lock_afterwards(completion):
    def hold():
        time.sleep(0.1)
        open(completion, "w").write(str(os.getpid()))
        ctypes.PyDLL(None).sleep(60)
    threading.Thread(target=hold, daemon=True).start()
    return 1

def hang(completion):
    open(completion, "w").write(str(os.getpid()))
    while True:
        pass
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path / "rewards.py"


def test_a_worker_is_reused_and_ends_with_the_pool(file):
    pool = GraderPool(str(file), "pid", {}, 5)
    first, second = (int(pool.ask({"completion": ""})) for _ in range(2))
    assert first == second
    assert is_running(first)
    pool.close()
    assert not is_running(first)
    with pytest.raises(NonRetryableError, match="the reward functions are closed"):
        pool.ask({"completion": ""})


def test_a_worker_that_hangs_is_killed(file, tmp_path):
    pool = GraderPool(str(file), "hang", {}, 0.5)
    with pytest.raises(TimeoutError):
        pool.ask({"completion": str(tmp_path / "pid")})
    assert not is_running(int((tmp_path / "pid").read_text()))
    pool.close()


def test_a_worker_that_reads_no_more_is_killed(file, tmp_path):
    pool = GraderPool(str(file), "keeps_the_lock_afterwards", {}, 2)
    assert pool.ask({"completion": str(tmp_path / "pid")}) == 1
    assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    with pytest.raises(TimeoutError, match="no answer within 2 seconds"):
        pool.ask({"completion": "x" * 1_000_000})  # more than a pipe holds
    assert not is_running(int((tmp_path / "pid").read_text()))
    pool.close()


def test_a_worker_survives_sigterm(file):
    pool = GraderPool(str(file), "gets_sigterm", {}, 5)
    assert [pool.ask({"completion": ""}) for _ in range(2)] == [0.5, 0.5]
    pool.close()


def test_processes_that_a_function_starts_can_be_terminated(file):
    pool = GraderPool(str(file), "ends_others", {}, 20)
    assert pool.ask({"completion": ""}) == signal.SIGTERM + 0.5
    pool.close()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_a_hanging_worker_ends_with_its_killed_parent(file, tmp_path):
    place = tmp_path / "pid"
    pool = GraderPool(str(file), "hang", {}, 60)
    parent = start(lambda: pool.ask({"completion": str(place)}))
    assert wait_until(lambda: place.exists() and place.read_text())
    worker = int(place.read_text())
    assert is_running(worker)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_until(lambda: not is_running(worker))


def test_an_error_is_cut_but_for_its_line(file):
    pool = GraderPool(str(file), "raises_a_long_text", {}, 20)
    with pytest.raises(RuntimeError, match=r"^ValueError: x{188} \(rewards\.py, line \d+\)$"):
        pool.ask({"completion": ""})
    pool.close()


def test_a_worker_that_floods_its_pipe_is_killed(file):
    pool = GraderPool(str(file), "floods_the_pipe", {}, 20)
    with pytest.raises(RuntimeError, match=f"an answer must have at most {graders.MAX_BYTES} bytes"):
        pool.ask({"completion": ""})
    pool.close()


class Large:
    """Stands for an object that takes much memory."""


@pytest.mark.parametrize(
    "open_grader",
    [graders.Immediate, lambda ask: graders.Threads(ask, n_workers=1)],
    ids=["at once", "threads"],
)
def test_a_failure_keeps_nothing_alive_that_the_function_used(open_grader):
    used = []

    def ask(question):
        large = Large()
        used.append(weakref.ref(large))
        try:
            raise KeyError(large)
        except KeyError:
            raise ValueError("x" * 1000) from None

    grader = open_grader(ask)
    failure = grader.submit({}).exception(timeout=10)
    gc.collect()
    assert str(failure) == "x" * 300
    assert used[0]() is None
    grader.close()


def test_no_worker_starts_after_two_slow_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(graders, "START_LIMIT_S", 0.2)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef score(): return 1\n")
    pool = GraderPool(str(tmp_path / "slow.py"), "score", {}, 5)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            pool.ask({})
    with pytest.raises(NonRetryableError, match=r"slow\.py was not loaded within 0\.2 seconds, 2 times"):
        pool.ask({})
    pool.close()
