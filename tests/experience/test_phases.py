import pytest

from lit_rlkv.experience.phases import Phases
from tests.training import make_datamodule, make_roles


def test_listeners_hear_of_start_and_end_in_their_order():
    heard = []
    phases = Phases(
        [lambda *what: heard.append(("start", *what)), lambda *what: heard.append(("second", *what))],
        [lambda *what: heard.append(("end", *what))],
    )
    with phases("rollout", 3):
        heard.append("inside")
    assert heard == [("start", "rollout", 3), ("second", "rollout", 3), "inside", ("end", "rollout", 3)]


def test_a_phase_that_fails_has_no_end():
    ended = []
    with pytest.raises(ZeroDivisionError), Phases([], [lambda *what: ended.append(what)])("score", 0):
        _ = 1 / 0
    assert ended == []


def test_an_iteration_samples_scores_and_judges():
    data, heard = make_datamodule(make_roles()), []
    data.phases = Phases(
        [lambda *what: heard.append(("start", *what))], [lambda *what: heard.append(("end", *what))]
    )
    data.train_dataloader()
    data.train_dataloader()
    assert heard == [
        (moment, phase, iteration)
        for iteration in (0, 1)
        for phase in ("rollout", "score", "reward")
        for moment in ("start", "end")
    ]
