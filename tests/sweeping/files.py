"""Sweep files for tests."""

import yaml

from lit_rlkv.sweeping.sweep_file import COMMAND, read_sweep

GRID = {
    "program": "lit_rlkv/fit.py",
    "command": list(COMMAND),
    "method": "grid",
    "parameters": {"seed": {"values": [0, 1]}, "cache.budget": {"values": [5, 7]}},
}
LOG_LR = {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}
BAYES = GRID | {
    "method": "bayes",
    "run_cap": 5,
    "metric": {"name": "entropy", "goal": "minimize"},
    "parameters": {"optimizer.lr": LOG_LR, "cache.budget": {"min": 5, "max": 7}},
}


def write(folder, content, name="sweep.yaml"):
    path = folder / name
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def sweep_of(folder, content=GRID, *overrides):
    return read_sweep(write(folder, content), overrides)


def with_parameters(content=GRID, **parameters):
    return content | {"parameters": {name.replace("__", "."): node for name, node in parameters.items()}}
