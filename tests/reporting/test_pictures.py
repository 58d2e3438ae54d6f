from dataclasses import replace

import pytest

from lit_rlkv.reporting.eviction_record import eviction_record
from lit_rlkv.reporting.pictures import figures
from tests.reporting.plots.drawn import POSITIONS, layers
from tests.reporting.plots.test_kept_keys import CACHE
from tests.reporting.reports import EMPTY, FULL, make_rollout

LOSS_AND_ACCURACY = ["Loss", "Accuracy against budget"]


def named(report, name):
    return next(picture.figure for picture in figures(report) if picture.name == name)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"history": []}, ["Accuracy against budget", "Cache fill", "Key lifetimes in one sequence"]),
        ({"evictions": None, "before": [], "after": []}, ["Reward", "Mismatch of sampler and learner"]),
        ({"evictions": None, "history": [{"iteration": 1, "loss": 0.5}]}, LOSS_AND_ACCURACY),
    ],
)
def test_there_is_a_figure_for_what_has_data(changes, names):
    assert [picture.name for picture in figures(replace(FULL, **changes))] == names


def test_a_figure_that_fails_is_left_out_with_a_warning(caplog):
    broken = replace(EMPTY, history=FULL.history, diagnostics=[{"name": "mismatch", "iteration": 1}])
    assert [picture.name for picture in figures(broken)] == ["Reward", "Mismatch of sampler and learner"]
    assert "'Mismatch by position' cannot be drawn: KeyError" in caplog.text


def test_lifetimes_are_those_of_the_longest_sequence_with_its_tokens():
    record = eviction_record(make_rollout(), lambda token: f"t{token}")
    figure = named(replace(FULL, evictions=record), "Key lifetimes in one sequence")
    texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    # the first row has six tokens, the second five; the last token has no key
    assert texts == ["t0", "t1", "t2", "t3", "t4"]


def test_a_dense_run_has_no_budget_to_mark():
    dense = replace(FULL, config_yaml="cache: {policy: dense, budget: 16, interval: 4}")
    figure = named(dense, "Cache fill")
    assert not [line for line in figure.axes[0].lines if "budget" in str(line.get_label())]


BY_POSITION = ["Mismatch by position", "Overlap by position", "Why reweighting explodes with length"]


def names(report):
    return [picture.name for picture in figures(report)]


def test_each_measurement_has_its_pictures():
    assert names(EMPTY) == []
    assert names(replace(EMPTY, diagnostics=[POSITIONS])) == BY_POSITION
    assert names(replace(EMPTY, diagnostics=[layers(1, 0.1)])) == ["Which layer's eviction matters"]
    ess = [{"iteration": 1, "kv/arms/tis/ess": 0.5}]
    assert names(replace(EMPTY, history=ess)) == ["What is left after a correction"]


def test_the_last_measurement_has_its_pictures():
    earlier = {**CACHE, "iteration": 1}
    (shown,) = figures(replace(EMPTY, diagnostics=[earlier, CACHE]))
    assert shown.name == "Evicted and later needed"
    assert shown.caption.startswith("In iteration 11:")
