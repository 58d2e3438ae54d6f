from dataclasses import replace

import pytest

from lit_rlkv.reporting.report import headline
from tests.reporting.report.reports import FULL, eval_row


def test_the_headline_is_the_gain_under_the_budget():
    assert headline(FULL) == [
        "Accuracy under a budget of 16 keys: 0.46 → 0.81; dense: 0.99 → 0.98.",
        "Mean reward of the rollouts over 2 iterations: 0.25 → 0.75.",
    ]


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"before": [], "history": []}, ["Accuracy under a budget of 16 keys: 0.81; dense: 0.98."]),
        ({"budget": None, "history": []}, ["Accuracy with a dense cache: 0.99 → 0.98."]),
        ({"before": [], "after": [], "history": []}, ["This run neither trained nor evaluated a policy."]),
        (
            {"before": [], "after": [], "history": [{"iteration": 1, "reward": 0.5}]},
            ["Mean reward of the rollouts in one iteration: 0.50."],
        ),
        (
            {"before": [], "after": [eval_row("random 8+4", 8, 0.1)], "history": []},
            ["The run's own cache was not evaluated."],
        ),
    ],
)
def test_the_headline_tells_only_what_was_measured(changes, sentences):
    assert headline(replace(FULL, **changes)) == sentences
