"""W&B without an account: contents of an offline run, and resumes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import wandb
from matplotlib.figure import Figure

from lit_rlkv.reporting.loggers import GuardedLogger, wandb_run
from lit_rlkv.reporting.loggers.wandb_run import WandbRun, end_service
from lit_rlkv.reporting.pictures import Picture
from tests.reporting.loggers.offline_run import finished_runs, read_runs
from tests.reporting.loggers.recorded import place, start_in

pytestmark = pytest.mark.usefixtures("wandb_home")


def opened(run_dir, resumed_at=0, **settings):
    run_dir.mkdir(exist_ok=True)
    logger = WandbRun("tests", **settings)
    logger.open(start_in(run_dir, resumed_at, seed=3))
    return logger


def iterations(run):
    return [row["iteration"] for row in run.history if "reward" in row]


def test_a_run_without_an_account_is_kept_in_its_folder_with_config_and_environment(tmp_path):
    logger = opened(tmp_path / "run")
    said = logger.close(is_complete=True)
    assert said == f"to upload to W&B: wandb sync {tmp_path / 'run' / 'wandb'}"
    (run,) = finished_runs(tmp_path / "run")
    assert (run.project, run.name, run.exit_code) == ("tests", "run", 0)
    assert run.config["seed"] == 3
    assert run.config["environment"] == {"python": "3.11"}


def test_metrics_are_drawn_over_sampled_tokens_and_the_other_axes_are_there(tmp_path):
    logger = opened(tmp_path / "run")
    for iteration in (1, 2):
        logger.scalars({"reward": iteration / 2}, place(iteration))
    logger.close(is_complete=True)
    (run,) = finished_runs(tmp_path / "run")
    axes = ("rollout/tokens", "time/wall_clock_s", "iteration")
    assert [run.step_metric[axis] for axis in axes] == ["", "", ""]
    others = {run.step_metric[name] for name in run.step_metric.keys() - {*axes}}
    assert (others, "*" in run.step_metric) == ({"rollout/tokens"}, True)
    rows = [{k: v for k, v in row.items() if k[0] != "_"} for row in run.history]
    assert rows == [{"reward": iteration / 2, **place(iteration)} for iteration in (1, 2)]


def test_axes_layers_and_variants_have_no_panel_and_the_best_reward_is_kept(tmp_path):
    hidden = {"gradient/policy/layer_3/snr", "kv/layer_kl/all", "rollout_corr/rollout_is_seq_std"}
    shown = {"kl", "gradient/policy/snr", "kv/bytes", "rollout_corr/kl", "rollout_corr/rollout_is_mean"}
    logger = opened(tmp_path / "run")
    for iteration, reward in enumerate((0.25, 0.75, 0.5), start=1):
        logger.scalars({"reward": reward, **dict.fromkeys(hidden | shown, 1.0)}, place(iteration))
    logger.close(is_complete=True)
    (run,) = finished_runs(tmp_path / "run")
    assert run.hidden == {"iteration", "rollout/tokens", "time/wall_clock_s"} | hidden
    assert run.summary["reward"] == {"last": 0.5, "max": 0.75}
    assert run.summary["kl"] == 1.0


def test_in_a_sweep_of_wandb_the_reward_stays_one_number(tmp_path, monkeypatch):
    end_service(wandb.teardown)  # it reads its settings once a process
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    logger = opened(tmp_path / "run")
    logger.scalars({"reward": 0.5}, place(1))
    logger.close(is_complete=True)
    end_service(wandb.teardown)
    assert finished_runs(tmp_path / "run")[0].summary["reward"] == 0.5


def test_name_group_and_tags_are_those_given_and_the_folder_is_in_the_config(tmp_path):
    opened(tmp_path / "run", name="smd-seed0", group="smd", tags=["smd", "seed0"]).close(is_complete=True)
    (run,) = finished_runs(tmp_path / "run")
    assert (run.name, run.group, run.tags) == ("smd-seed0", "smd", ["smd", "seed0"])
    assert run.config["run_dir"] == "run"


def test_a_growing_table_keeps_all_its_rows_and_sends_each_once(tmp_path):
    logger = opened(tmp_path / "run")
    for iteration in (1, 2, 3):
        logger.table("samples", ["iteration", "text"], [[iteration, "a"]], place(iteration), grows=True)
    logger.close(is_complete=True)
    (run,) = finished_runs(tmp_path / "run")
    assert run.table("samples") == [[[1, "a"]], [[2, "a"]], [[3, "a"]]]
    logged = [row for row in run.history if "samples/path" in row]
    assert [row["samples/increment_num"] for row in logged] == [0, 1, 2]
    assert [len(row["samples/previous_increments_paths"]) for row in logged] == [0, 1, 2]
    assert [row["rollout/tokens"] for row in logged] == [100, 200, 300]


def test_a_table_that_does_not_grow_is_logged_as_it_is(tmp_path):
    logger = opened(tmp_path / "run")
    for accuracy in (0.5, 0.75):
        logger.table("evaluation", ["cache", "accuracy"], [["dense", accuracy]], place(1))
    logger.close(is_complete=True)
    assert finished_runs(tmp_path / "run")[0].table("evaluation") == [[["dense", 0.5]], [["dense", 0.75]]]


def test_figures_are_images_with_their_captions(tmp_path):
    logger = opened(tmp_path / "run")
    logger.figures([Picture(Figure(figsize=(2, 1)), "Cache fill", "how full")], place(7))
    logger.close(is_complete=True)
    (run,) = finished_runs(tmp_path / "run")
    (row,) = run.history
    image = {k.removeprefix("figures/cache_fill/"): v for k, v in row.items() if k.startswith("figures/")}
    assert (image["_type"], image["width"], image["height"]) == ("image-file", 300, 150)
    assert image["caption"] == "how full"
    assert (run.folder / "files" / image["path"]).is_file()
    assert row["iteration"] == 7


@pytest.mark.parametrize("log_model", [True, False])
def test_the_report_is_an_artifact_and_the_model_on_request(tmp_path, log_model):
    (tmp_path / "report.html").write_text("<html>")
    (tmp_path / "iteration-2").mkdir()
    (tmp_path / "iteration-2" / "state.json").write_text("{}")
    logger = opened(tmp_path / "run", log_model=log_model)
    logger.file(tmp_path / "report.html", "report")
    logger.file(tmp_path / "iteration-2", "model")
    logger.close(is_complete=True)
    expected = {"report": ["report.html"]} | ({"model": ["state.json"]} if log_model else {})
    assert finished_runs(tmp_path / "run")[0].artifacts == expected


def test_a_failed_run_is_marked_as_such(tmp_path):
    opened(tmp_path / "run").close(is_complete=False)
    assert finished_runs(tmp_path / "run")[0].exit_code == 1


def test_a_resumed_run_is_the_same_run_and_knows_what_it_holds(tmp_path):
    first = opened(tmp_path / "run")
    for iteration in (1, 2, 3):
        first.scalars({"reward": 0.5}, place(iteration))
    first.close(is_complete=False)
    finished_runs(tmp_path / "run")
    again = opened(tmp_path / "run", resumed_at=2)
    assert again.last_iteration == 3
    assert not again.keeps_tables  # an offline run cannot look at its past
    again.scalars({"reward": 0.5}, place(4))
    again.close(is_complete=True)
    earlier, later = finished_runs(tmp_path / "run")
    assert earlier.id == later.id
    assert later.resumes
    assert [*iterations(earlier), *iterations(later)] == [1, 2, 3, 4]


def test_another_folder_is_another_run(tmp_path):
    opened(tmp_path / "a").close(is_complete=True)
    opened(tmp_path / "b").close(is_complete=True)
    assert finished_runs(tmp_path / "a")[0].id != finished_runs(tmp_path / "b")[0].id


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, ".")
    from lit_rlkv.reporting.loggers.wandb_run import WandbRun
    from tests.reporting.loggers.recorded import place, start_in

    logger = WandbRun("tests", offline=True)
    logger.open(start_in(Path(sys.argv[1])))
    for iteration in range(1, 16):
        logger.scalars({"reward": 0.5, **{f"metric_{n}": 0.5 for n in range(500)}}, place(iteration))
    print("logged", flush=True)
    signal.pause()
"""


def killed_run(run_dir):
    """A run that was killed with all its processes after 15 iterations, while wandb had some in its hands."""
    run_dir.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(run_dir)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
    )
    assert process.stdout.readline() == "logged\n"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_what_a_kill_took_from_wandb_is_known_after_a_resume(tmp_path):
    killed_run(tmp_path / "run")
    (cut_short,) = read_runs(tmp_path / "run")
    held = iterations(cut_short)
    assert 0 < len(held) < 15  # a row is some 20 KiB, and wandb writes by 32
    again = opened(tmp_path / "run", resumed_at=14)
    assert again.last_iteration == len(held)
    again.close(is_complete=True)
    assert iterations(read_runs(tmp_path / "run")[0]) == held


KILLS_SERVICE = """
    import logging, os, signal, subprocess, sys
    from pathlib import Path
    sys.path.insert(0, ".")
    from rich.console import Console
    from lit_rlkv.reporting.loggers import GuardedLogger
    from lit_rlkv.reporting.loggers.wandb_run import WandbRun
    from tests.reporting.loggers.recorded import place, start_in

    logging.basicConfig()
    logger, start = WandbRun("tests", offline=True), start_in(Path(sys.argv[1]))
    with GuardedLogger(logger, start, Console(file=sys.stdout)) as guarded:
        for iteration in range(1, 6):
            guarded.send("an iteration", lambda to: to.scalars({"reward": 0.5}, place(iteration)))
            if iteration == int(sys.argv[2]):
                service = logger._wandb.setup().ensure_service()._proc
                os.kill(service._process.pid, signal.SIGKILL)
                service._process.wait()
    assert guarded.is_broken
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [1, 5])
def test_a_killed_service_costs_one_warning_and_no_traceback(tmp_path, killed_after):
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLS_SERVICE), str(tmp_path / "run"), str(killed_after)],
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("wandb: ")]
    assert (done.returncode, done.stdout, len(said)) == (0, "", 1), done.stderr
    place = "an iteration" if killed_after == 1 else "ending"
    assert f"WandbRun failed at {place} and gets no more data; the run continues" in said[0]
    assert not said[0].endswith(": ")


def test_a_missing_wandb_stops_nothing(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import then raises ImportError
    from rich.console import Console

    with GuardedLogger(WandbRun("tests"), start_in(tmp_path), Console()) as guarded:
        guarded.send("an iteration", lambda to: to.scalars({"reward": 0.5}, place(1)))
    (warning,) = caplog.records
    assert "WandbRun failed at starting" in warning.getMessage()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_service_that_cannot_be_reached_leaves_the_run_in_its_folder(tmp_path, monkeypatch, caplog):
    end_service(wandb.teardown)  # it reads its settings once a process
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    logger = opened(tmp_path / "run")
    logger.scalars({"reward": 0.5}, place(1))
    assert "wandb sync" in logger.close(is_complete=True)
    assert "W&B is not reachable" in caplog.text
    assert iterations(finished_runs(tmp_path / "run")[0]) == [1]
    end_service(wandb.teardown)


def test_a_service_that_does_not_end_is_left_after_a_while(monkeypatch):
    monkeypatch.setattr(wandb_run, "TEARDOWN_TIMEOUT_S", 0.1)
    is_over = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not stop within 0\.1 seconds"):
        end_service(is_over.wait)
    is_over.set()
    end_service(is_over.wait)
    with pytest.raises(ZeroDivisionError):
        end_service(lambda: 1 / 0)


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"project": "a/b"}, "project must be a W&B project name"),
        ({"project": ""}, "project must be a W&B project name"),
        ({"project": "a", "offline": "yes"}, "offline must be true, false or null, got yes"),
        ({"project": "a", "figures_every": 0}, "figures_every must be a whole number of at least 1, got 0"),
        ({"project": "a", "finish_timeout_s": 0}, "finish_timeout_s must be a number above 0, got 0"),
    ],
)
def test_invalid_settings_are_refused_before_wandb_is_imported(settings, says):
    with pytest.raises(ValueError, match=says):
        WandbRun(**settings)
