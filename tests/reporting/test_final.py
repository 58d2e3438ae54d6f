"""The numbers that a run is judged by."""

import pytest

from lit_rlkv.reporting.final import FINAL_METRICS, final_metrics
from lit_rlkv.types import EvalRow


def row(budget, accuracy, kl=0.0, kv_bytes=1000, learned=None):
    return EvalRow(
        cache="dense" if budget is None else f"random {budget}+5",
        budget=budget,
        accuracy=accuracy,
        n_problems=10,
        mean_length=5.0,
        kv_bytes=kv_bytes,
        kl=kl,
        replay_gap=0.0,
        learned_reward=learned,
    )


BEFORE = [row(None, 0.99), row(16, 0.6, 0.5), row(12, 0.4)]
AFTER = [row(None, 0.95), row(16, 0.8, 0.1, 500), row(12, 0.5)]


def test_they_are_of_the_runs_own_budget_and_of_all_keys():
    found = final_metrics(BEFORE, AFTER, 16)
    assert found == pytest.approx(
        {
            "eval/accuracy": 0.8,
            "eval/dense_accuracy": 0.95,
            "eval/accuracy_gain": 0.2,
            "eval/dense_accuracy_gain": -0.04,
            "eval/kl": 0.1,
            "eval/kv_bytes": 500.0,
        }
    )
    assert final_metrics(BEFORE, AFTER, 12)["eval/accuracy"] == 0.5


def test_a_dense_run_has_one_accuracy_under_both_names():
    found = final_metrics([], [row(None, 0.9)], None)
    assert (found["eval/accuracy"], found["eval/dense_accuracy"]) == (0.9, 0.9)
    assert "eval/accuracy_gain" not in found


def test_what_was_not_measured_is_left_out():
    assert final_metrics(BEFORE, [], 16) == {}
    assert "eval/learned_reward" not in final_metrics([], AFTER, 16)
    assert final_metrics([], [row(16, 0.8, learned=1.5)], 16)["eval/learned_reward"] == 1.5


def test_no_name_is_missing_in_the_list_of_all():
    full = final_metrics(BEFORE, [row(None, 0.9), row(16, 0.8, learned=1.5)], 16)
    assert tuple(full) == FINAL_METRICS
