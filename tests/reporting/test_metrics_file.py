import csv
from pathlib import Path

from lit_rlkv.reporting.metrics_file import MetricsFile, read_metrics


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


def test_a_row_that_was_cut_is_no_row(tmp_path):
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path)
    for iteration in (9, 10, 11):
        first.on_iteration_end(iteration, 20, {"reward": 1.5e-3})
    path.write_bytes(path.read_bytes()[:-4])
    assert [row["iteration"] for row in MetricsFile(path, resumed_at=11).history] == [9.0, 10.0]


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
