"""AdamW with moments in 8 bits, of the optional extra `lowbit`."""

import importlib.util

import pytest
import torch

from lit_rlkv.config import ConfigError
from lit_rlkv.runs.preflight import checked_config
from tests.whole_runs import composed, config, rows_of, run

LAST = "checkpoints/iteration-000004"
OPTIONS = [
    "experiment=shadow",
    "stages=[sft,rl]",
    "reward=mixed",
    "roles.rank=128",  # moments of fewer than 4,096 numbers stay as they are
    "roles.alpha=128",
    "algorithm.lr_schedule=constant",
    "callbacks.samples_every=9",
    "diagnostics=none",
]


def moments_of(folder):
    """Return the first moments that a checkpoint holds, loaded as tensors alone."""
    state = torch.load(folder / LAST / "optimizer.pt", weights_only=True)["optimizer"]["state"]
    return [values["exp_avg"] for values in state.values()]


@pytest.mark.slow
def test_moments_in_8_bits_train_and_resume_bit_for_bit(tmp_path):
    pytest.importorskip("torchao")
    run(tmp_path, "adamw", *OPTIONS, "algorithm.n_iterations=4")
    options = [*OPTIONS, "optimizer=adamw8bit"]
    run(tmp_path, "straight", *options, "algorithm.n_iterations=4")
    run(tmp_path, "resumed", *options, "algorithm.n_iterations=2")
    run(tmp_path, "resumed", *options, "algorithm.n_iterations=4", resumes=True)
    adamw, straight, resumed = (rows_of(tmp_path / name) for name in ("adamw", "straight", "resumed"))
    for name in ("loss", "grad_norm", "reward", "learning_rate"):
        assert [row[name] for row in straight] == [row[name] for row in resumed]
    weights = [tmp_path / name / LAST / "trainable.safetensors" for name in ("straight", "resumed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert straight[0]["loss"] == adamw[0]["loss"]  # before the first step
    assert straight[-1]["loss"] != adamw[-1]["loss"]
    kinds = {type(moment).__name__ for moment in moments_of(tmp_path / "straight")}
    assert "OptimState8bit" in kinds
    sizes = [(tmp_path / name / LAST / "optimizer.pt").stat().st_size for name in ("straight", "adamw")]
    assert sizes[0] < 0.4 * sizes[1]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_without_torchao_the_error_says_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match=r"No module named 'torchao'; pip install -e \"\.\[lowbit\]\""):
        config(tmp_path, "optimizer=adamw8bit")


def test_sharded_layers_refuse_moments_in_8_bits():
    says = r"^optimizer: 8-bit states cannot be gathered from shards .fabric\.strategy=fsdp2."
    with pytest.raises(ConfigError, match=says):
        checked_config(composed("fabric.strategy=fsdp2", "optimizer=adamw8bit"))


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Adamax", "SGD"])
def test_what_a_config_says_of_an_optimizer_is_loaded_as_plain_numbers(tmp_path, name):
    betas = [] if name == "SGD" else ["+optimizer.betas=[0.9,0.98]"]
    chosen = [f"optimizer._target_=torch.optim.{name}", "~optimizer.betas", *betas]
    optimizer = config(tmp_path, *chosen).parts.optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["param_groups"][0]["lr"] == 1e-3
