"""What each run is told."""

from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from tests.sweeping.files import GRID, plan_of, with_parameters


def test_a_run_is_told_its_values_and_the_users_overrides_win(tmp_path):
    content = with_parameters(seed={"values": [0, 1]}, experiment={"value": "smd"}, logger={"value": "wandb"})
    plan = plan_of(tmp_path, content, "experiment=tis", "task.n_terms=3")
    assert plan.arguments({"seed": 1}, Path("runs/it's")) == [
        "experiment=smd", "logger=wandb", "logger=csv", "fabric.n_threads=1", "seed=1", "experiment=tis",
        "task.n_terms=3", "hydra.run.dir='runs/it\\'s'",
    ]  # fmt: skip
    cfg = plan.compose({"seed": 1}, Path("runs/it's")).cfg
    assert (cfg.seed, cfg.correction.weigh.cap, cfg.logger, cfg.fabric.n_threads) == (1, 2.0, None, 1)


def test_the_users_logger_and_threads_replace_those_of_sweeps(tmp_path):
    arguments = plan_of(tmp_path, GRID, "logger=tensorboard", "fabric.n_threads=4").arguments({}, Path("x"))
    assert arguments == ["logger=tensorboard", "fabric.n_threads=4", "hydra.run.dir='x'"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=3", "seed=3: the sweep itself varies seed"),
        ("resume=runs/x", "a sweep gives every run a folder of its own"),
        ("hydra.run.dir=x", "a sweep gives every run a folder of its own"),
        ("smd", "'smd' is no override; give key=value"),
    ],
)
def test_overrides_that_contradict_the_sweep_are_refused(tmp_path, override, says):
    with pytest.raises(ConfigError, match=says):
        plan_of(tmp_path, GRID, override)
