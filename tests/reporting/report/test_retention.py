from dataclasses import replace

from lit_rlkv.reporting.report import figures
from tests.reporting.plots.test_retention import CACHE
from tests.reporting.report.reports import EMPTY


def test_the_last_measurement_has_its_pictures():
    earlier = {**CACHE, "iteration": 1, "attention_kept": [[0.0, 0.0]] * 3}
    shown = figures(replace(EMPTY, diagnostics=[earlier, CACHE]))
    assert [picture.name for picture in shown] == [
        "Attention that eviction left",
        "Evicted and later needed",
        "Age of keys at their eviction",
    ]
    assert all(picture.caption.startswith("In iteration 11:") for picture in shown)
    assert shown[0].figure.axes[0].images[0].get_array()[0, 0] == 0.9


def test_a_run_that_evicted_nothing_has_none():
    assert figures(replace(EMPTY, diagnostics=[])) == []
