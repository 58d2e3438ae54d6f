"""A sweep on W&B: its server chooses the runs, and agents on this machine start them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.plan import Plan
from lit_rlkv.sweeping.sweep_file import ARGUMENTS

PROJECT = "lit_rlkv"
"""Project of a sweep that names none, and of `logger=wandb`."""
FOLDER = "hydra.run.dir=${runs_dir}/wandb/${oc.env:WANDB_SWEEP_ID}/${oc.env:WANDB_RUN_ID}"
"""Folder of a run; agents may start runs in the same second, so the time is no name."""


def wandb_config(plan: Plan, max_runs: int | None = None) -> dict[str, Any]:
    """Return the sweep file for W&B, with dots in nested names and the overrides in the command."""
    source = dict(plan.sweep.source)
    source["parameters"] = _flat(source["parameters"])
    command = list(plan.sweep.command)
    place = command.index(ARGUMENTS) + 1
    # Later overrides win: the user's, as in a sweep here.
    source["command"] = [
        *(*command[:place], *replace(plan, on_wandb=True).defaults()),
        *(*command[place:], *plan.overrides, FOLDER),
    ]
    if max_runs is not None:
        source["run_cap"] = max_runs
    return source


def run_on_wandb(plan: Plan, n_jobs: int, max_runs: int | None = None) -> int:
    """Create the sweep on W&B, run agents here until it ends, and return the number of failed agents.

    Raises:
        ConfigError: no account is configured, or W&B refuses the sweep.
    """
    import wandb  # here, because it takes a second

    is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
    source = plan.sweep.source
    project, entity = source.get("project", PROJECT), source.get("entity")
    try:
        if is_offline or not wandb.login(prompt=False):
            raise ConfigError(
                "--wandb needs an account, and none is configured, or WANDB_MODE is offline; run `wandb "
                "login`, or leave out --wandb to run the sweep here"
            )
        sweep_id = wandb.sweep(wandb_config(plan, max_runs), entity=entity, project=project)
    except wandb.errors.Error as error:
        raise ConfigError(f"--wandb: W&B did not take the sweep: {error}") from error
    return run_agents("/".join(part for part in (entity, project, sweep_id) if part), n_jobs)


def run_agents(sweep_path: str, n_jobs: int) -> int:
    """Run agents in processes of their own, each with one run at a time; return the number of failed ones.

    Ctrl-C reaches the agents, which end their runs.
    """
    here = str(Path(sys.executable).parent)  # the command names `python`, which must be this one
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    env["PATH"] = f"{here}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, "-m", "wandb", "agent", "--forward-signals", sweep_path]
    agents = [subprocess.Popen(command, env=env) for _ in range(n_jobs)]
    try:
        return sum(agent.wait() != 0 for agent in agents)
    except KeyboardInterrupt:
        for agent in agents:
            agent.wait()
        raise


def _flat(parameters: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, options in parameters.items():
        if "parameters" in options:
            flat |= _flat(options["parameters"], f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = options
    return flat
