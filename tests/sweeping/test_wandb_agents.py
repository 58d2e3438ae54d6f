"""The config for W&B and its agents; nothing here reaches W&B's servers."""

import os
import sys

import pytest
from hydra import compose, initialize_config_dir
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.sweeping.wandb_agents import run_agents, run_on_wandb, wandb_config
from tests.sweeping.files import COMMAND, GRID, plan_of, with_parameters

NESTED = {"cache": {"parameters": {"budget": {"values": [12, 16]}}}, "stages": {"value": ["sft", "eval"]}}


def started_by_an_agent(config, values):
    """The words of a run's command line as W&B's agent expands them."""
    arguments = create_sweep_command_args(
        {"args": {name: {"value": value} for name, value in values.items()}}
    )
    words = []
    for word in config["command"]:
        words += arguments.get(word[2:-1], [sys.executable]) if word.startswith("${") else [word]
    return words


def test_an_agent_starts_the_run_that_an_offline_sweep_would_start(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    monkeypatch.setenv("WANDB_RUN_ID", "run1")
    plan = plan_of(tmp_path, GRID | {"parameters": NESTED}, "experiment=tis")
    config = wandb_config(plan, max_runs=3)
    assert config["parameters"] == {
        "cache.budget": {"values": [12, 16]},
        "stages": {"value": ["sft", "eval"]},
    }
    assert config["run_cap"] == 3
    words = started_by_an_agent(config, {"cache.budget": 12, "stages": ["sft", "eval"]})
    assert words[:4] == [sys.executable, "python", "-m", "lit_rlkv.fit"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        full = compose("config", overrides=words[4:], return_hydra_config=True)
    own = plan.compose({"cache.budget": 12}, tmp_path / "x").cfg
    assert full.hydra.run.dir == "runs/wandb/sweep1/run1"
    assert full.logger.project == "lit_rlkv"
    for key in ("stages", "cache", "correction", "distillation", "seed", "task"):
        assert full[key] == own[key], key
    assert full.cache.budget == 12


def test_a_logger_of_the_file_or_of_the_user_is_kept(tmp_path):
    content = with_parameters(GRID, seed={"values": [0]}, logger={"value": "wandb"})
    assert "logger=wandb" not in wandb_config(plan_of(tmp_path, content))["command"]
    command = wandb_config(plan_of(tmp_path, GRID, "logger=tensorboard"))["command"]
    assert [word for word in command if word.startswith("logger")] == ["logger=tensorboard"]
    assert wandb_config(plan_of(tmp_path, GRID))["command"][: len(COMMAND) + 1] == [*COMMAND, "logger=wandb"]
    assert "run_cap" not in wandb_config(plan_of(tmp_path, GRID))


def test_the_users_overrides_win_over_the_files_own_command(tmp_path):
    content = GRID | {"command": [*COMMAND, "algorithm.n_iterations=10"]}
    command = wandb_config(plan_of(tmp_path, content, "algorithm.n_iterations=50"))["command"]
    assert command.index("algorithm.n_iterations=50") > command.index("algorithm.n_iterations=10")


@pytest.mark.parametrize("mode", [None, "offline"])
def test_without_an_account_it_says_what_to_do(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ConfigError, match=r"needs an account, and none is configured.*leave out --wandb"):
        run_on_wandb(plan_of(tmp_path, GRID), n_jobs=1)


def test_each_job_is_an_agent_that_finds_this_python_first(tmp_path, monkeypatch):
    # a stand-in for the `wandb` package, which writes down how it was called
    (tmp_path / "wandb.py").write_text(
        "import os, sys\n"
        f"path = r'{tmp_path}/' + str(os.getpid())\n"
        "told = [*sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.environ['PATH']]\n"
        "open(path, 'w').write(' '.join(told))\n"
        "sys.exit(int(sys.argv[-1][-1] == '!'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_agents("team/lit_rlkv/abc", n_jobs=2) == 0
    calls = [path.read_text() for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert len(calls) == 2
    assert all(call.startswith("agent --forward-signals team/lit_rlkv/abc 1 ") for call in calls)
    assert all(call.split()[-1].startswith(os.path.dirname(sys.executable)) for call in calls)
    assert run_agents("team/lit_rlkv/fails!", n_jobs=2) == 2


def test_agents_keep_to_the_users_folder_and_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    monkeypatch.setenv("WANDB_RUN_ID", "run1")

    def run_of(*overrides):
        words = started_by_an_agent(wandb_config(plan_of(tmp_path, GRID, *overrides)), {"seed": 0})
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            cfg = compose("config", overrides=words[4:], return_hydra_config=True)
        return cfg.hydra.run.dir, cfg.fabric.n_threads

    assert run_of() == ("runs/wandb/sweep1/run1", 1)
    assert run_of("runs_dir=/data/x", "fabric.n_threads=4") == ("/data/x/wandb/sweep1/run1", 4)
