import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.reporting.metrics_file import MetricsFile, RunAxes
from lit_rlkv.reporting.run_metrics import SECONDS, TOKENS, final_metrics, read_metrics


def rows_of(axes, *n_tokens):
    """Return the metrics that RunAxes adds for iterations with these token counts."""
    rows = []
    for iteration, n in enumerate(n_tokens, start=1):
        metrics = {"num_tokens": float(n)}
        axes.on_iteration_end(iteration, 9, metrics)
        rows.append({"iteration": float(iteration), **metrics})
    return rows


def test_tokens_add_up_and_time_runs():
    axes = RunAxes()
    axes.on_fit_start(None, None)
    rows = rows_of(axes, 100, 50, 7)
    assert [row[TOKENS] for row in rows] == [100, 150, 157]
    assert 0 < rows[0][SECONDS] < rows[1][SECONDS] < rows[2][SECONDS] < 60


def test_a_resumed_run_continues_its_axes_without_the_time_in_between():
    before = [
        {"iteration": 1.0, TOKENS: 100.0, SECONDS: 1000.0},
        {"iteration": 2.0, TOKENS: 180.0, SECONDS: 2000.0},
    ]
    axes = RunAxes(before)
    time.sleep(0.2)  # loading and warming up are no training either
    axes.on_fit_start(None, None)
    (row,) = rows_of(axes, 20)
    assert row[TOKENS] == 200
    assert 2000 < row[SECONDS] < 2000.2


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_iteration_is_a_row_and_new_metrics_make_a_column(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.csv")
    metrics.on_iteration_end(1, 3, {"reward": 0.5})
    metrics.on_iteration_end(2, 3, {"reward": 0.6})
    metrics.on_iteration_end(3, 3, {"reward": 0.7, "kl": 0.1})
    rows = read(tmp_path / "metrics.csv")
    assert [row["reward"] for row in rows] == ["0.5", "0.6", "0.7"]
    assert [row["kl"] for row in rows] == ["", "", "0.1"]


def test_a_resumed_run_keeps_its_past_and_drops_what_it_will_do_again(tmp_path):
    first = MetricsFile(tmp_path / "metrics.csv")
    for iteration in (1, 2, 3):
        first.on_iteration_end(iteration, 4, {"reward": iteration / 10})
    again = MetricsFile(tmp_path / "metrics.csv", resumed_at=2)
    again.on_iteration_end(3, 4, {"reward": 0.9})
    rows = read(tmp_path / "metrics.csv")
    assert [(row["iteration"], row["reward"]) for row in rows] == [
        ("1.0", "0.1"),
        ("2.0", "0.2"),
        ("3.0", "0.9"),
    ]
    assert [row["iteration"] for row in again.history] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("damage", ["missing", "empty", "a line cut", "zeros at the end"])
def test_a_resumed_run_says_how_many_rows_are_missing_and_keeps_the_last_axes(tmp_path, caplog, damage):
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path)
    for iteration in (1, 2, 3):
        first.on_iteration_end(iteration, 9, {"rollout/tokens": 100.0 * iteration})
    lines = path.read_bytes().splitlines(keepends=True)
    cut = {"a line cut": b"".join(lines[:3])[:-4], "zeros at the end": b"".join(lines[:2]) + b"\0" * 4096}
    path.write_bytes(cut.get(damage, b""))
    if damage == "missing":
        path.unlink()
    again = MetricsFile(path, resumed_at=3, last={"rollout/tokens": 300.0})
    n_kept = int(damage in cut)
    assert f"{path} lacks the rows of {2 - n_kept} of 3 iterations up to the checkpoint" in caplog.text
    assert RunAxes(again.history).n_tokens == 300
    assert [row["iteration"] for row in read(path)] == ["1.0"] * n_kept + ["3.0"]


def test_rows_in_another_order_or_twice_are_put_in_order(tmp_path, caplog):
    path = tmp_path / "metrics.csv"
    path.write_text("iteration,reward,kl\n0,9,9\n3,0.3,\n2,9,9\n2,0.2,0\n1,0.1,0\n4,0.4,0\n")
    rows = MetricsFile(path, resumed_at=3, last={"reward": 9, "kl": 0.5}).history
    assert [(row["iteration"], row["reward"], row["kl"]) for row in rows] == [
        (1, 0.1, 0),
        (2, 0.2, 0),
        (3, 0.3, 0.5),
    ]
    assert caplog.text == ""


@pytest.mark.parametrize("iteration", ["nan", "inf"])
def test_an_iteration_that_is_no_number_is_damage(tmp_path, iteration):
    path = tmp_path / "metrics.csv"
    path.write_text(f"iteration,reward\n{iteration},1\n")
    with pytest.raises(ValueError, match="every iteration must be finite"):
        read_metrics(path)


def test_a_file_that_is_being_written_gives_its_whole_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    assert read_metrics(path) == []
    path.write_text("iteration,reward,kl\r\n1.0,0.5,\r\n2.0,0.75,0.1\r\n3.0,0.8")
    assert read_metrics(path) == [
        {"iteration": 1.0, "reward": 0.5},
        {"iteration": 2.0, "reward": 0.75, "kl": 0.1},
    ]


def test_a_full_disk_costs_a_warning_and_no_row(tmp_path, monkeypatch, caplog):
    metrics = MetricsFile(tmp_path / "metrics.csv")
    metrics.on_iteration_end(1, 4, {"reward": 0.1})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        for iteration in (2, 3):
            metrics.on_iteration_end(iteration, 4, {"reward": 0.1})
    metrics.on_iteration_end(4, 4, {"reward": 0.1})
    assert [row["iteration"] for row in read(tmp_path / "metrics.csv")] == ["1.0", "2.0", "3.0", "4.0"]
    assert caplog.text.count("No space left on device") == 1


def full(*args, **options):
    raise OSError(28, "No space left on device")


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


def test_final_metrics_cover_the_runs_own_budget_and_the_dense_cache():
    found = final_metrics(BEFORE, AFTER, "random 16+5")
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
    assert final_metrics(BEFORE, AFTER, "random 12+5")["eval/accuracy"] == 0.5


def test_a_dense_run_has_one_accuracy_under_both_names():
    found = final_metrics([], [row(None, 0.9)], "dense")
    assert (found["eval/accuracy"], found["eval/dense_accuracy"]) == (0.9, 0.9)
    assert "eval/accuracy_gain" not in found


def test_mean_rewards_are_final_metrics_with_or_without_an_accuracy():
    unknown = [replace(one, accuracy=None, reward=one.accuracy / 2) for one in AFTER]
    found = final_metrics(BEFORE, unknown, "random 16+5")
    assert (found["eval/reward"], found["eval/dense_reward"]) == (0.4, 0.475)
    assert not [name for name in found if "accuracy" in name]
    accuracies = [replace(one, reward=1.5) for one in AFTER]
    assert final_metrics([], accuracies, "random 16+5").keys() >= {"eval/accuracy", "eval/reward"}


def test_missing_measurements_are_left_out():
    assert final_metrics(BEFORE, [], "random 16+5") == {}
    assert "eval/learned_reward" not in final_metrics([], AFTER, "random 16+5")
    assert final_metrics([], [row(16, 0.8, learned=1.5)], "random 16+5")["eval/learned_reward"] == 1.5
