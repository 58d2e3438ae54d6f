from dataclasses import replace

from lit_rlkv.reporting.report import figures
from tests.reporting.report.reports import EMPTY

TIMES = {"time/rollout": 3.0, "time/score": 1.0, "time/reward": 0.5, "time/update": 2.0}


def names(history):
    return [picture.name for picture in figures(replace(EMPTY, history=history))]


def test_phases_that_were_measured_have_their_pictures():
    assert names([{"iteration": 1, "time/update": 2.0}]) == []
    assert names([{"iteration": 1, **TIMES}]) == ["Time per phase"]
    assert names([{"iteration": 1, **TIMES, "memory/rollout/peak": 2.0**20}]) == [
        "Time per phase",
        "Memory per phase",
    ]
