import csv

from lit_rlkv.callbacks.logs import LoggerBridge, MetricsFile, wandb_logger


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


class FailingLogger:
    n_calls = 0

    def log_hyperparams(self, config):
        self.n_calls += 1
        raise OSError("no space left on device")

    log_metrics = finalize = log_hyperparams


class KeepingLogger:
    def __init__(self):
        self.rows = []

    def log_hyperparams(self, config):
        self.rows.append(config)

    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics))


def test_a_logger_that_fails_is_reported_once_and_stops_nothing(caplog):
    logger = FailingLogger()
    bridge = LoggerBridge(logger, {})
    bridge.on_fit_start(None, None)
    bridge.on_iteration_end(1, 2, {"reward": 0.5})
    bridge.on_iteration_end(2, 2, {"reward": 0.5})
    assert logger.n_calls == 1
    assert "no space left on device" in caplog.text


def test_config_and_metrics_reach_the_logger():
    logger = KeepingLogger()
    bridge = LoggerBridge(logger, {"seed": 3})
    bridge.on_fit_start(None, None)
    bridge.on_iteration_end(4, 9, {"reward": 0.5})
    assert logger.rows == [{"seed": 3}, (4, {"reward": 0.5})]


def test_wandb_without_an_account_writes_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    bridge = LoggerBridge(wandb_logger("tests", str(tmp_path)), {"seed": 3})
    bridge.on_fit_start(None, None)
    bridge.on_iteration_end(1, 1, {"reward": 0.5})
    bridge.on_fit_end(None, None)
    bridge.logger.experiment.finish()
    assert not bridge.is_broken
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
