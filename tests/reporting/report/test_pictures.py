from dataclasses import replace

import pytest

from lit_rlkv.evaluation.reward_model import RewardReport
from lit_rlkv.reporting.report import figures
from tests.reporting.report.reports import FULL


def named(report, name):
    return next(picture.figure for picture in figures(report) if picture.name == name)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"history": []}, ["Accuracy against budget", "Cache fill", "Key lifetimes in one sequence"]),
        ({"rollout": None, "before": [], "after": []}, ["Reward", "Mismatch of sampler and learner"]),
        ({"rollout": None, "history": [{"iteration": 1, "loss": 0.5}]}, ["Accuracy against budget"]),
        (
            {
                "rollout": None,
                "before": [],
                "after": [],
                "history": [{"iteration": 1, "rewards/learned": 0.5}],
                "reward_model": RewardReport(10, 0.9, 1.5, 0.5, 0.05, [0.2, 0.8], [0.1, 0.9], [10, 10]),
            },
            ["Proxy and gold", "How sure the reward model should be"],
        ),
    ],
)
def test_there_is_a_figure_for_what_has_data(changes, names):
    assert [name for _, name, _ in figures(replace(FULL, stage_seconds={}, **changes))] == names


def test_lifetimes_are_those_of_the_longest_sequence_with_its_tokens():
    labels = {token: f"t{token}" for token in range(5)}
    figure = named(replace(FULL, token_labels=labels), "Key lifetimes in one sequence")
    texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    # the first row has six tokens, the second five; the last token has no key
    assert texts == ["t0", "t1", "t2", "t3", "t4"]


def test_a_dense_run_has_no_budget_to_mark():
    dense = replace(FULL, budget=None, interval=None)
    figure = named(dense, "Cache fill")
    assert not [line for line in figure.axes[0].lines if "budget" in str(line.get_label())]
