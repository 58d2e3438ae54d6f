"""The same sweep on W&B: its server chooses the runs, agents on this machine start them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.plan import Plan, key_of
from lit_rlkv.sweeping.spec import ARGUMENTS

PROJECT = "lit_rlkv"
"""That `logger=wandb` uses, and a sweep that names none."""
DEFAULTS = ("logger=wandb", "fabric.n_threads=1")
"""Of runs side by side on one machine, unless the file or the user says otherwise."""
FOLDER = "hydra.run.dir=${runs_dir}/wandb/${oc.env:WANDB_SWEEP_ID}/${oc.env:WANDB_RUN_ID}"
"""Agents may start runs in the same second, so a folder named by time would not do."""


def wandb_config(plan: Plan, max_runs: int | None = None) -> dict[str, Any]:
    """The sweep file as its server gets it: nested names joined by dots, and the overrides in the command."""
    source = dict(plan.sweep.source)
    source["parameters"] = _flat(source["parameters"])
    command = list(plan.sweep.command)
    given = {key_of(override) for override in (*plan.sweep.fixed_overrides, *plan.overrides)}
    given |= {parameter.name for parameter in plan.sweep.parameters}
    defaults = [override for override in DEFAULTS if key_of(override) not in given]
    own = [*defaults, *plan.overrides, FOLDER]
    place = command.index(ARGUMENTS) + 1
    source["command"] = [*command[:place], *own, *command[place:]]
    if max_runs is not None:
        source["run_cap"] = max_runs
    return source


def hand_over(plan: Plan, n_jobs: int, max_runs: int | None = None) -> int:
    """Create the sweep on W&B and run agents here until it ends; returns how many of them have failed.

    Raises:
        ConfigError: there is no account to create it in, or its server refuses it.
    """
    import wandb  # here: it takes a second, for which only its users should pay

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
    """Agents in processes of their own, each one run at a time; returns how many have failed.

    Ctrl-C reaches them, and they their runs.
    """
    here = str(Path(sys.executable).parent)  # the command says `python`, which must be this one
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
