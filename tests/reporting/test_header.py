"""The first lines of a run on the terminal."""

from pathlib import Path

import torch

from lit_rlkv.reporting.header import SMOKE_TEST, header, trained_parameters
from tests.whole_runs import config

CPU = torch.device("cpu")


def fields(tmp_path, *overrides, choices=None):
    lines = header(config(tmp_path, *overrides), Path("runs/mine").absolute(), 1, CPU, choices or {})
    return {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}


def test_a_header_says_what_is_trained_how_and_where(tmp_path):
    found = fields(tmp_path, "seed=3", "algorithm=ppo", choices={"experiment": "smd", "debug": "none"})
    keys = {"run", "task", "model", "algorithm", "arm", "roles", "cache", "seed", "devices", "stages"}
    assert found.keys() == keys
    assert (found["run"], found["seed"], found["stages"]) == ("runs/mine", "3", "sft, rl, eval")


def test_an_environment_is_named_with_its_tools(tmp_path):
    found = fields(tmp_path, "environment=tools")
    assert found["environment"].startswith("Tools(tools=[lit_rlkv.environments.tools.calculator]")


def test_full_fine_tuning_has_no_adapters_and_its_learning_rate(tmp_path):
    found = fields(tmp_path, "roles=full", "roles.rank=8", "optimizer.lr=1e-5")["roles"]
    assert found.startswith("ppo: ")
    assert "no adapters" in found
    assert "1e-05" in found


def test_trained_parameters_are_counted():
    module = torch.nn.Linear(3, 1)
    module.bias.requires_grad_(False)
    assert trained_parameters(module) == "3 of 4 parameters are trained (75.0%)"


def test_a_smoke_test_says_that_nothing_is_learned(tmp_path):
    assert SMOKE_TEST in header(config(tmp_path), tmp_path, 1, CPU, {"debug": "fast"})
    assert SMOKE_TEST not in header(config(tmp_path), tmp_path, 1, CPU, {"debug": "none"})
