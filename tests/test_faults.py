"""NaN and signals: what is left out, what ends, and when."""

import os
import signal

import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.faults import FiniteSteps, InterruptedRunError, Interruption, NonFiniteError

FABRIC = Fabric(accelerator="cpu")
NAN, FINE = torch.tensor(torch.nan), torch.tensor(1.0)


def test_a_step_without_a_finite_gradient_is_left_out():
    guard = FiniteSteps(n_tolerated=2)
    norms = [FINE, NAN, torch.tensor(torch.inf), FINE, NAN, NAN]
    assert [guard.may_step(norm, {}) for norm in norms] == [True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"policy_loss": NAN, "kl": FINE}, "not finite in the last of them: policy_loss. Lower"),
        ({"policy_loss": FINE}, "all losses and metrics of the last of them were finite"),
    ],
)
def test_too_many_in_a_row_end_training_with_what_was_not_finite(terms, says):
    guard = FiniteSteps(n_tolerated=1)
    guard.may_step(NAN, terms)
    with pytest.raises(NonFiniteError, match=says):
        guard.may_step(NAN, terms)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_what_can_be_broken_off(number):
    before = signal.getsignal(number)
    with (
        pytest.raises(InterruptedRunError, match=signal.Signals(number).name),
        Interruption().listening(),
    ):
        send(number)
    assert signal.getsignal(number) is before


def test_a_signal_waits_for_what_is_held():
    done = []
    with Interruption().listening() as interruption:
        with interruption.held():
            interruption.end_if_agreed()
            send(signal.SIGTERM)
            done.append("step")
            interruption.end_if_agreed()  # nobody has been asked whether they were
            assert interruption.is_asked(FABRIC)
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            interruption.end_if_agreed()
    assert done == ["step"]


def test_nothing_that_survives_failures_takes_a_signal_for_one():
    assert not issubclass(InterruptedRunError, Exception)


def test_nobody_who_was_not_asked_ends():
    interruption = Interruption()
    assert not interruption.is_asked(FABRIC)
    interruption.end_if_agreed()


def test_inside_of_what_is_held_a_block_may_be_broken_off():
    with Interruption().listening() as interruption, interruption.held():
        with interruption.granted(False):
            send(signal.SIGTERM)  # held all the same
        with pytest.raises(InterruptedRunError), interruption.granted(True):
            pytest.fail("a signal that came before it ends it")
    with (
        Interruption().listening() as interruption,
        interruption.held(),
        pytest.raises(InterruptedRunError),
        interruption.granted(True),
    ):
        send(signal.SIGTERM)
