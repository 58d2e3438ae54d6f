"""W&B without an account: contents of an offline run, and resumes."""

import sys

import pytest
import wandb
from matplotlib.figure import Figure
from rich.console import Console

from lit_rlkv.files import DamagedFileError
from lit_rlkv.reporting.loggers import GuardedLogger
from lit_rlkv.reporting.loggers.wandb_run import WandbRun
from lit_rlkv.reporting.pictures import Picture
from tests.reporting.loggers.offline_run import finished_runs
from tests.reporting.loggers.recorded import place, start_in

pytestmark = pytest.mark.usefixtures("wandb_home")


def opened(run_dir, resumed_at=0, **settings):
    run_dir.mkdir(exist_ok=True)
    logger = WandbRun("tests", **settings)
    logger.open(start_in(run_dir, resumed_at, seed=3))
    return logger


def iterations(run):
    return [row["iteration"] for row in run.history if "reward" in row]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "iteration-2").mkdir()
    (tmp_path / "iteration-2" / "state.json").write_text("{}")
    return tmp_path / "iteration-2"


def test_a_run_without_an_account_is_kept_in_its_folder_with_all_that_it_was_sent(tmp_path, model):
    (tmp_path / "report.html").write_text("<html>")
    logger = opened(tmp_path / "run", name="smd-seed0", group="smd", tags=["smd", "seed0"], log_model=True)
    for iteration in (1, 2):
        logger.scalars({"reward": iteration / 2}, place(iteration))
    for accuracy in (0.5, 0.75):
        logger.table("evaluation", ["cache", "accuracy"], [["dense", accuracy]], place(2))
    logger.figures([Picture(Figure(figsize=(2, 1)), "Reward", "how good")], place(7))
    logger.file(tmp_path / "report.html", "report")
    logger.file(model, "model")
    said = logger.close(is_complete=True)

    assert said == f"to upload to W&B: wandb sync {tmp_path / 'run' / 'wandb'}"
    (run,) = finished_runs(tmp_path / "run")
    assert (run.project, run.name, run.group, run.tags) == ("tests", "smd-seed0", "smd", ["smd", "seed0"])
    assert run.config["seed"] == 3
    assert (run.config["environment"], run.config["run_dir"]) == ({"python": "3.11"}, "run")
    assert (run.artifacts["report"], run.artifacts["model"], run.exit_code) == (
        ["report.html"],
        ["state.json"],
        0,
    )
    axes = ("rollout/tokens", "time/wall_clock_s", "iteration")
    assert [run.step_metric[axis] for axis in axes] == ["", "", ""]
    others = {run.step_metric[name] for name in run.step_metric.keys() - {*axes}}
    assert (others, "*" in run.step_metric) == ({"rollout/tokens"}, True)
    rows = [{k: v for k, v in row.items() if k[0] != "_"} for row in run.history]
    assert rows[:2] == [{"reward": iteration / 2, **place(iteration)} for iteration in (1, 2)]
    assert run.table("evaluation") == [[["dense", 0.5]], [["dense", 0.75]]]
    image = {k.removeprefix("figures/reward/"): v for k, v in rows[-1].items() if k.startswith("figures/")}
    assert (image["_type"], image["width"], image["height"]) == ("image-file", 300, 150)
    assert (image["caption"], rows[-1]["iteration"]) == ("how good", 7)
    assert (run.folder / "files" / image["path"]).is_file()


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_a_resume_offline_replaces_the_part_of_before_unless_it_was_uploaded(tmp_path, model, is_uploaded):
    first = opened(tmp_path / "run")
    for iteration in (1, 2, 3):
        first.scalars({"reward": 0.5}, place(iteration))
    first.file(model, "model")  # not without log_model
    first.close(is_complete=False)
    (before,) = finished_runs(tmp_path / "run")
    assert (before.name, before.exit_code, before.artifacts) == ("run", 1, {})
    if is_uploaded:
        (before.folder / f"run-{before.id}.wandb.synced").touch()  # as `wandb sync` does
    again = opened(tmp_path / "run", resumed_at=2)
    assert again.last_iteration == (2 if is_uploaded else 0)
    again.scalars({"reward": 0.5}, place(4))
    again.close(is_complete=True)
    *earlier, later = finished_runs(tmp_path / "run")
    assert (len(earlier), later.id, later.resumes) == (int(is_uploaded), before.id, True)
    assert iterations(later) == [4]


def test_only_an_id_of_wandb_is_taken_from_the_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb.json").write_text('{"id": "../*"}')
    with pytest.raises(DamagedFileError, match="is no id of a W&B run"):
        opened(tmp_path / "run")


def test_a_missing_wandb_stops_nothing(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import then raises ImportError
    with GuardedLogger(WandbRun("tests"), start_in(tmp_path), Console()) as guarded:
        guarded.send("an iteration", lambda to: to.scalars({"reward": 0.5}, place(1)))
    (warning,) = caplog.records
    assert "WandbRun failed at starting" in warning.getMessage()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_service_that_cannot_be_reached_leaves_the_run_in_its_folder(tmp_path, monkeypatch, caplog):
    wandb.teardown()  # it reads its settings once a process
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    logger = opened(tmp_path / "run")
    logger.scalars({"reward": 0.5}, place(1))
    assert "wandb sync" in logger.close(is_complete=True)
    assert "W&B is not reachable" in caplog.text
    assert iterations(finished_runs(tmp_path / "run")[0]) == [1]
    wandb.teardown()


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"project": "a/b"}, "project must be a W&B project name"),
        ({"project": ""}, "project must be a W&B project name"),
        ({"project": "a", "offline": "yes"}, "offline must be true or false or null, got .yes."),
        (
            {"project": "a", "figures_every": 0},
            "figures_every must be a whole number of at least 1 or null, got 0",
        ),
    ],
)
def test_invalid_settings_are_refused_before_wandb_is_imported(settings, says):
    with pytest.raises(ValueError, match=says):
        WandbRun(**settings)
