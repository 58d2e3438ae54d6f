import csv

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from lit_rlkv.reporting.loggers import as_run_logger
from tests.reporting.loggers.recorded import KeepingLogger, place, start_in


def test_lightnings_csv_logger_gets_config_and_metrics_over_iterations(tmp_path):
    logger = as_run_logger(CSVLogger(tmp_path, name="lightning_csv"))
    logger.open(start_in(tmp_path, seed=3))
    for iteration in (1, 2):
        logger.scalars({"reward": iteration / 2}, place(iteration))
    logger.close(is_complete=True)
    folder = tmp_path / "lightning_csv" / "version_0"
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["reward"], row["rollout/tokens"]) for row in rows] == [
        ("1", "0.5", "100.0"),
        ("2", "1.0", "200.0"),
    ]
    noted = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert noted == {"seed": 3, "environment": {"python": "3.11"}}


def test_a_row_is_on_the_disk_before_the_next_one(tmp_path):
    logger = as_run_logger(CSVLogger(tmp_path, name="csv"))
    logger.open(start_in(tmp_path))
    logger.scalars({"reward": 0.5}, place(1))
    assert "0.5" in (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()


def test_a_resumed_run_keeps_the_files_of_before(tmp_path):
    for resumed_at in (0, 1):
        logger = as_run_logger(CSVLogger(tmp_path, name="csv"))
        logger.open(start_in(tmp_path, resumed_at))
        assert logger.last_iteration == resumed_at
        logger.scalars({"reward": 0.5}, place(resumed_at + 1))
        logger.close(is_complete=False)
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == ["version_0", "version_1"]


def test_what_is_no_logger_is_refused():
    logger = KeepingLogger()
    assert as_run_logger(logger) is logger
    with pytest.raises(TypeError, match="logger is a dict"):
        as_run_logger({})
