"""An interrupt that waits for its moment."""

import os
import signal

import pytest

from lit_rlkv.sweeping.interrupt import interrupts_held


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_waits_for_the_check_and_only_there_it_strikes(number):
    before = signal.getsignal(number)
    with interrupts_held() as check:
        check()
        os.kill(os.getpid(), number)
        reached = True
        with pytest.raises(KeyboardInterrupt):
            check()
    assert reached
    assert signal.getsignal(number) is before


def test_a_second_one_does_not_wait():
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
