"""Processes that end with the first one of their run."""

import atexit
import os
import select
import signal
import threading

import pytest
from lightning.fabric import Fabric
from lightning.fabric.utilities import distributed

from lit_rlkv.faults import InterruptedRunError
from lit_rlkv.runs.launch import FIRST, end_without, ending_together


def forked(work):
    """A child that does this work and nothing else."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(7)
    return child


def ends_with_first(watches, within_s):
    """Whether a process that would wait for ever ends when the one is killed that started it."""
    alive, held_open = os.pipe()  # can be read once all that could write to it have ended
    over = threading.Event()

    def wait():
        first = os.getppid()
        os.write(held_open, str(os.getpid()).encode())
        watches(first, over)
        signal.pause()

    first = forked(lambda: (forked(wait), signal.pause()))
    os.close(held_open)
    waiting = int(os.read(alive, 20))
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    has_ended = bool(select.select([alive], [], [], within_s)[0])
    if not has_ended:
        os.kill(waiting, signal.SIGKILL)
    os.close(alive)
    return has_ended


def watch(first, over):
    threading.Thread(target=end_without, args=(first, over), daemon=True).start()


def watch_until_it_is_over(first, over):
    watch(first, over)
    over.set()


def test_a_process_ends_with_the_one_that_started_it_and_only_as_long_as_they_work():
    assert ends_with_first(watch, within_s=20.0)
    assert not ends_with_first(watch_until_it_is_over, within_s=2.0)
    assert not ends_with_first(lambda first, over: None, within_s=2.0)


def test_a_process_that_starts_when_the_first_is_gone_already_ends_at_once():
    nobody = forked(lambda: None)
    os.waitpid(nobody, 0)

    def start_late():
        os.environ |= {FIRST: str(nobody), "LOCAL_RANK": "1"}
        with ending_together(Fabric(accelerator="cpu", devices=2)):
            threading.Event().wait(20.0)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(start_late), 0)[1]) == 1


def takes_leave(error, monkeypatch):
    """Whether a process that ends by this error takes leave of the others, as Lightning does by NCCL."""
    monkeypatch.setattr(distributed, "_distributed_is_initialized", lambda: True)
    monkeypatch.setattr(distributed.torch.distributed, "destroy_process_group", lambda: os._exit(3))

    def end():
        atexit._clear()
        try:
            with ending_together(Fabric(accelerator="cpu", devices=2)):
                atexit.register(distributed._destroy_dist_connection)
                if error is not None:
                    raise error
        except BaseException:
            pass
        finally:
            atexit._run_exitfuncs()

    status = os.waitstatus_to_exitcode(os.waitpid(forked(end), 0)[1])
    assert status in (3, 7)
    return status == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, True), (InterruptedRunError("all have agreed"), True), (OSError("of one rank"), False)],
)
def test_one_that_fails_alone_does_not_wait_for_the_others_to_take_leave(error, expected, monkeypatch):
    assert takes_leave(error, monkeypatch) == expected


def test_one_process_alone_has_nothing_to_do_with_it():
    with ending_together(Fabric(accelerator="cpu", devices=1)):
        assert FIRST not in os.environ
    with ending_together(Fabric(accelerator="cpu", devices=2)):
        assert os.environ[FIRST] == str(os.getpid())
    assert FIRST not in os.environ
