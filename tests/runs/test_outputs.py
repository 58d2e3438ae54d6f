"""A whole run and its logger: W&B without an account, TensorBoard, and one that fails."""

import csv
import json

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.config.resumed import load_resumed_config
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.fit import fit
from lit_rlkv.reporting.loggers import RunLogger, lightning_loggers
from lit_rlkv.runs import outputs
from lit_rlkv.runs.checkpoint import CheckpointDir
from lit_rlkv.runs.preflight import checked_config
from tests.reporting.loggers.offline_run import finished_runs
from tests.reporting.loggers.recorded import KeepingLogger
from tests.whole_runs import TINY, config, run

QUICK = ("diagnostics=none", "evaluation.budgets=[]", "stages=[rl,eval]")


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory):
    """A folder with a SFT model."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "first", "diagnostics=none", "stages=[sft]")
    return folder


@pytest.fixture
def _no_account(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def keeping(monkeypatch, **settings):
    """Puts a logger that keeps everything in the place of the config's."""
    logger = KeepingLogger(**settings)
    monkeypatch.setattr(outputs, "as_run_logger", lambda built: logger)
    return logger


@pytest.mark.slow
@pytest.mark.usefixtures("_no_account")
def test_everything_of_a_run_is_in_its_wandb_run(sft_runs):
    run(sft_runs, "wandb", "logger=wandb", "logger.log_model=true", *QUICK)
    (found,) = finished_runs(sft_runs / "wandb")
    assert found.config["seed"] == 0
    assert found.config["cache"]["budget"] == 7
    assert found.config["environment"]["packages"]["torch"]
    assert found.step_metric["*"] == "rollout/tokens"
    logged = [row for row in found.history if "reward" in row]
    for row, written in zip(logged, rows_of(sft_runs / "wandb"), strict=True):
        assert {name: row[name] for name in written} == pytest.approx(
            {name: float(value) for name, value in written.items()}, nan_ok=True
        )
    assert [row[0] for draw in found.table("samples") for row in draw] == [1] * 4 + [2] * 4
    assert {row[0] for row in found.table("evaluation")[0]} == {"before", "after"}
    final = json.loads((sft_runs / "wandb" / "evaluation.json").read_text())["final"]
    assert any(row.get("eval/accuracy") == final["eval/accuracy"] for row in found.history)
    shown = {key.split("/")[1] for row in found.history for key in row if key.startswith("figures/")}
    assert {"reward", "accuracy_against_budget", "key_lifetimes_in_one_sequence"} <= shown
    assert found.artifacts["report"] == ["report.html"]
    assert "trainable.safetensors" in found.artifacts["model"]
    assert found.exit_code == 0


def killed(cfg, run_dir):
    """A run that stops with an error in its second iteration, with a checkpoint of the first."""

    save = CheckpointDir.save

    def save_once(self, iteration, *state):
        if iteration > 1:
            raise RuntimeError("out of memory")
        return save(self, iteration, *state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointDir, "save", save_once)
        with pytest.raises(RuntimeError, match="out of memory"):
            fit(cfg, run_dir, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.usefixtures("_no_account")
def test_a_resumed_run_logs_to_the_same_wandb_run(sft_runs):
    folder = sft_runs / "killed"
    killed(config(sft_runs, "logger=wandb", *QUICK), folder)
    (cut_short,) = finished_runs(folder)
    assert cut_short.exit_code == 1
    again, cfg, _ = load_resumed_config(compose_resume(folder), Choices({}, ()))
    fit(checked_config(cfg), again, Console(quiet=True), resumes=True)
    (whole,) = finished_runs(folder)  # it replaces the part of before
    assert whole.id == cut_short.id
    assert [row["iteration"] for row in whole.history if "reward" in row] == [1, 2]
    assert [row[0] for draw in whole.table("samples") for row in draw] == [1] * 4 + [2] * 4
    assert len(json.loads((folder / "environment.json").read_text())) == 2


@pytest.mark.slow
def test_token_and_time_axes_continue_in_a_resumed_run(sft_runs):
    folder = sft_runs / "axes"
    killed(config(sft_runs, *QUICK), folder)
    before = rows_of(folder)[0]
    again, cfg, _ = load_resumed_config(compose_resume(folder), Choices({}, ()))
    fit(checked_config(cfg), again, Console(quiet=True), resumes=True)
    first, second = rows_of(folder)
    assert first == before
    assert float(second["rollout/tokens"]) == float(first["num_tokens"]) + float(second["num_tokens"])
    assert float(second["time/wall_clock_s"]) > float(first["time/wall_clock_s"]) > 0


@pytest.mark.slow
def test_lightnings_logger_writes_into_the_folder_of_the_run_that_goes_on_also_where_it_was_moved(sft_runs):
    killed(config(sft_runs, "logger=lightning_csv", *QUICK), sft_runs / "there")
    assert [path.name for path in (sft_runs / "there" / "lightning_csv").iterdir()] == ["version_0"]
    folder = (sft_runs / "there").rename(sft_runs / "here")
    again, cfg, _ = load_resumed_config(compose_resume(folder), Choices({}, ()))
    fit(checked_config(cfg), again, Console(quiet=True), resumes=True)
    assert {path.name for path in (folder / "lightning_csv").iterdir()} == {"version_0", "version_1"}
    assert not (sft_runs / "there").exists()
    run(sft_runs, "elsewhere", "logger=lightning_csv", f"+logger.save_dir={sft_runs / 'given'}", *QUICK)
    assert (sft_runs / "given" / "lightning_csv" / "version_0").is_dir()


def compose_resume(folder):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config", overrides=[f"resume={folder}"])


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", ["open", "scalars", "table", "figures", "file", "close"])
def test_a_logger_that_fails_anywhere_stops_no_run(sft_runs, monkeypatch, caplog, fails_at):
    logger = keeping(monkeypatch, fails_at={fails_at})
    results = run(sft_runs, f"fails-{fails_at}", "logger=wandb", *QUICK)
    assert logger.named(fails_at)
    assert len(results.after) == 2
    assert len(rows_of(sft_runs / f"fails-{fails_at}")) == 2
    assert (sft_runs / f"fails-{fails_at}" / "report.html").is_file()
    assert sum("no space left" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_a_rollout_that_cannot_be_recorded_costs_a_figure_and_not_the_run(sft_runs, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("no keys")

    monkeypatch.setattr(outputs, "eviction_record", fail)
    run(sft_runs, "unrecorded", *QUICK)
    page = (sft_runs / "unrecorded" / "report.html").read_text()
    assert "Accuracy against budget" in page
    assert "Key lifetimes" not in page
    assert "the report has no key lifetimes: no keys" in caplog.text


@pytest.mark.slow
def test_figures_during_training_show_the_rollout_of_the_iteration(sft_runs, monkeypatch):
    logger = keeping(monkeypatch, figures_every=2)
    run(sft_runs, "figures", "logger=wandb", *QUICK)
    during, at_end = logger.named("figures")
    assert during[1]["iteration"] == at_end[1]["iteration"] == 2
    assert "Key lifetimes in one sequence" in [picture.name for picture in during[0]]


@pytest.mark.slow
def test_a_run_can_be_watched_in_tensorboard(sft_runs):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(sft_runs, "tb", "logger=tensorboard", *QUICK)
    events = EventAccumulator(str(sft_runs / "tb" / lightning_loggers.FOLDER))
    events.Reload()
    written = [float(row["reward"]) for row in rows_of(sft_runs / "tb")]
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(written)
    assert "figures/reward" in events.Tags()["images"]
    assert "samples/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_a_run_without_a_logger_still_notes_its_environment(sft_runs):
    (start,) = json.loads((sft_runs / "first" / "environment.json").read_text())
    assert start["seeds"] == {"seed": 0, "sft.seed": 0}
    assert not (sft_runs / "first" / "wandb").exists()


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["logger=wandb", "+logger.projct=x"], "unexpected 'projct'; it takes project, entity, name"),
        (["logger=wandb", "logger.project=a/b"], "project must be a W&B project name"),
        (["logger=wandb", "logger.log_model=1"], "log_model must be true or false, got 1"),
        (
            ["logger=wandb", "logger.figures_every=0"],
            "figures_every must be a whole number of at least 1 or null, got 0",
        ),
        (
            ["logger=tensorboard", "logger.figures_every=-1"],
            "figures_every must be a whole number .*got -1",
        ),
    ],
)
def test_a_mistake_in_a_loggers_settings_is_refused_before_work(tmp_path, overrides, says):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=[*TINY, f"runs_dir={tmp_path}", *overrides])
    with pytest.raises(ConfigError, match=says):
        checked_config(cfg)


def test_tensorboard_without_its_package_is_refused_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(lightning_loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'logger=tensorboard needs the package .*\[tensorboard\]"'):
        config(tmp_path, "logger=tensorboard")


def test_every_call_of_a_logger_can_fail_in_the_test_above():
    public = {name for name, value in vars(RunLogger).items() if callable(value) and name[0] != "_"}
    assert public == {"open", "scalars", "table", "figures", "file", "close"}
