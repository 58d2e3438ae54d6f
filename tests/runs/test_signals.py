"""Signals that ask a run to stop."""

import os
import signal

import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.runs.signals import InterruptedRunError, Interruption

FABRIC = Fabric(accelerator="cpu")
NAN, FINE = torch.tensor(torch.nan), torch.tensor(1.0)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_at_once(number):
    before = signal.getsignal(number)
    with (
        pytest.raises(InterruptedRunError, match=signal.Signals(number).name),
        Interruption().handle_signals(),
    ):
        send(number)
    assert signal.getsignal(number) is before


def test_a_deferred_signal_waits_for_the_end_of_the_block():
    done = []
    with Interruption().handle_signals() as interruption:
        with interruption.deferred():
            interruption.raise_if_agreed()
            send(signal.SIGTERM)
            done.append("step")
            interruption.raise_if_agreed()  # nobody has been asked whether they were
            assert interruption.is_requested(FABRIC)
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            interruption.raise_if_agreed()
    assert done == ["step"]


def test_except_exception_does_not_catch_an_interruption():
    assert not issubclass(InterruptedRunError, Exception)


def test_without_a_signal_nothing_ends():
    interruption = Interruption()
    assert not interruption.is_requested(FABRIC)
    interruption.raise_if_agreed()
    interruption.raise_if_requested(FABRIC)


def test_a_requested_end_is_raised_at_the_next_check():
    with Interruption().handle_signals() as interruption, interruption.deferred():
        send(signal.SIGTERM)
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            interruption.raise_if_requested(FABRIC)


def test_inside_deferred_an_immediate_block_is_broken_off():
    with Interruption().handle_signals() as interruption, interruption.deferred():
        with interruption.immediate(False):
            send(signal.SIGTERM)  # held all the same
        with pytest.raises(InterruptedRunError), interruption.immediate(True):
            pytest.fail("a signal that came before it ends it")
    with (
        Interruption().handle_signals() as interruption,
        interruption.deferred(),
        pytest.raises(InterruptedRunError),
        interruption.immediate(True),
    ):
        send(signal.SIGTERM)
