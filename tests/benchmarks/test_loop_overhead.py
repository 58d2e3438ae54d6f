"""Times of the parts of an iteration."""

import pytest
from loop_overhead import CHECKPOINT, LOADER, PHASES, REST, Clock, Marks, Timed, measure, table

from lit_rlkv.callbacks.hooks import HOOKS, RLCallback
from lit_rlkv.reporting.samples import Samples
from tests.whole_runs import config


class Hand:
    """The hand of a clock, which is moved."""

    def __init__(self):
        self.at = 0.0

    def __call__(self):
        return self.at


def test_a_part_within_another_stops_its_clock():
    hand = Hand()
    clock = Clock(hand)
    hand.at = 1.0
    with clock("update"):
        hand.at = 3.0
        with clock("Callback"):
            hand.at = 7.0
        hand.at = 8.0
    hand.at = 16.0
    # 1 before and 8 after; 2 and 1 around the 4 of the callback
    assert clock.read() == {REST: 9.0, "update": 3.0, "Callback": 4.0}


def test_the_loader_is_what_no_phase_and_no_callback_took_of_the_data():
    hand = Hand()
    clock = Clock(hand)
    marks = Marks(clock)
    for iteration, slow in enumerate((100.0, 1.0)):
        began_at = hand.at
        hand.at += 2.0 * slow  # problems
        marks.on_phase_start("rollout", iteration)
        hand.at += 8.0
        marks.on_phase_end("rollout", iteration)
        hand.at += 1.0  # credit
        with clock("Callback"):
            hand.at += 4.0
        data_s = hand.at - began_at
        marks.on_phase_start("update", iteration)
        hand.at += 16.0
        marks.on_phase_end("update", iteration)
        hand.at += 32.0
        marks.on_iteration_end(iteration + 1, 2, {"time/data": data_s})
    # The first iteration is not counted; problems and credit of the second are 2 + 1.
    expected = {"rollout": 8.0, "Callback": 4.0, "update": 16.0, LOADER: 3.0, REST: 32.0}
    assert marks.found == expected
    assert marks.n_iterations == 1


def test_every_hook_reaches_the_callback_that_is_timed():
    called = []

    class Loud(RLCallback):
        pass

    for hook in HOOKS:
        setattr(Loud, hook, lambda self, *arguments, hook=hook: called.append(hook))
    timed = Timed(Loud(), Clock())
    for hook in HOOKS:
        getattr(timed, hook)()
    assert tuple(called) == HOOKS


def test_a_run_is_charged_to_its_parts_and_to_nothing_else(tmp_path):
    cfg = config(tmp_path, "stages=[sft,rl]", "algorithm.n_iterations=3", "diagnostics=none")
    found, n_iterations = measure(cfg, tmp_path / "run")
    assert n_iterations == 2
    assert {*PHASES[:3], "update", CHECKPOINT, LOADER, REST, Samples.__name__} <= found.keys()
    assert min(found.values()) >= 0
    assert list((tmp_path / "run" / "checkpoints").glob("iteration-*"))
    lines = table(found).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(PHASES)
    assert sum(float(line.split()[1]) for line in lines[1:-1]) == pytest.approx(
        float(lines[-1].split()[1]), abs=0.2
    )
