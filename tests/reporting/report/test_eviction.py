from dataclasses import replace

from lit_rlkv.reporting.report import figures, render
from tests.reporting.plots.measurements import POSITIONS, arm_history, layers
from tests.reporting.report.reports import EMPTY

BY_POSITION = ["Mismatch by position", "Overlap by position", "Why reweighting explodes with length"]


def names(report):
    return [picture.name for picture in figures(report)]


def test_each_measurement_has_its_pictures():
    assert names(EMPTY) == []
    assert names(replace(EMPTY, diagnostics=[POSITIONS])) == BY_POSITION
    assert names(replace(EMPTY, diagnostics=[layers(1, 0.1)])) == ["Which layer's eviction matters"]
    assert names(replace(EMPTY, history=arm_history(0.5))) == [
        "What each correction would make of the rollouts"
    ]


def test_the_last_measurement_is_the_one_that_is_shown():
    earlier = {**POSITIONS, "iteration": 1, "overlap_mean": [0.1] * 4}
    pictures = figures(replace(EMPTY, diagnostics=[earlier, layers(1, 0.1), POSITIONS]))
    (overlap,) = (picture for picture in pictures if picture.name == "Overlap by position")
    assert overlap.figure.axes[0].lines[0].get_ydata()[1] == 0.9
    assert overlap.caption.startswith("In iteration 7:")


def test_the_page_has_them():
    page = render(replace(EMPTY, diagnostics=[POSITIONS, layers(1, 0.1)]))
    assert page.count("<figure") == 4
