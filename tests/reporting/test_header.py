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
    assert found == {
        "run": "runs/mine",
        "task": "ChainSum(n_terms=3, max_operand=9)",
        "model": "tiny_qwen3 from random weights, 2 layers, 4 KV heads, 32 wide",
        "algorithm": "PPO, 2 iterations of 8 prompts × 2 responses",
        "arm": "smd: exact replay and Shadow Mask Distillation",
        "roles": "hydra: adapters of rank 32, learning rate 0.001",
        "cache": "random 7+2 (budget + interval slots)",
        "seed": "3",
        "devices": "1 × cpu, precision 32-true",
        "stages": "sft, rl, eval",
    }


def test_a_header_says_that_full_fine_tuning_has_no_adapters_and_its_learning_rate(tmp_path):
    found = fields(tmp_path, "roles=full", "roles.rank=8", "optimizer.lr=1e-5")["roles"]
    assert (
        found
        == "ppo: all weights, no adapters (roles.rank and roles.alpha are not used), learning rate 1e-05"
    )


def test_trained_parameters_are_counted():
    module = torch.nn.Linear(3, 1)
    module.bias.requires_grad_(False)
    assert trained_parameters(module) == "3 of 4 parameters are trained (75.0%)"


def test_a_smoke_test_says_that_nothing_is_learned(tmp_path):
    assert SMOKE_TEST in header(config(tmp_path), tmp_path, 1, CPU, {"debug": "fast"})
    assert SMOKE_TEST not in header(config(tmp_path), tmp_path, 1, CPU, {"debug": "none"})
