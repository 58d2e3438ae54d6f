"""Sweep files for tests."""

import yaml

from lit_rlkv.sweeping.plan import Plan
from lit_rlkv.sweeping.sweep_file import read_sweep

COMMAND = ["${env}", "python", "-m", "lit_rlkv.fit", "${args_no_hyphens}"]
GRID = {
    "program": "lit_rlkv/fit.py",
    "command": COMMAND,
    "method": "grid",
    "metric": {"name": "eval/accuracy", "goal": "maximize"},
    "parameters": {"seed": {"values": [0, 1]}, "cache.budget": {"values": [12, 16]}},
}
BAYES = GRID | {
    "method": "bayes",
    "run_cap": 24,
    "metric": {"name": "reward", "goal": "maximize"},
    "parameters": {
        "optimizer.lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
        "experiment": {"values": ["naive", "smd"]},
    },
}


def write(folder, content, name="sweep.yaml"):
    path = folder / name
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def plan_of(folder, content, *overrides):
    return Plan(read_sweep(write(folder, content)), overrides)


def with_parameters(content=GRID, **parameters):
    return content | {"parameters": {name.replace("__", "."): node for name, node in parameters.items()}}
