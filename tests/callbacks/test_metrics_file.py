import csv

from lit_rlkv.callbacks.metrics_file import MetricsFile


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
