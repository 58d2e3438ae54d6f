"""What each run is told."""

from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.plan import by_key, groups_of
from tests.sweeping.files import GRID, plan_of, with_parameters


def test_a_run_is_told_its_values_and_the_users_overrides_win(tmp_path):
    content = with_parameters(seed={"values": [0, 1]}, experiment={"value": "smd"}, logger={"value": "wandb"})
    plan = plan_of(tmp_path, content, "experiment=tis", "task.n_terms=3")
    assert plan.arguments({"seed": 1}, Path("runs/it's")) == [
        "experiment=smd", "logger=wandb", "logger=csv", "fabric.n_threads=1", "seed=1", "experiment=tis",
        "task.n_terms=3", "hydra.run.dir='runs/it\\'s'",
    ]  # fmt: skip
    cfg = plan.compose({"seed": 1}, Path("runs/it's")).cfg
    assert (cfg.seed, cfg.correction.weight_fn.cap, cfg.logger, cfg.fabric.n_threads) == (1, 2.0, None, 1)


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


ARMS = with_parameters(seed={"values": [0]}, experiment={"values": ["tis", "smd"]})


@pytest.mark.parametrize("override", ["distillation=anchor", "correction=naive", "+distillation=anchor"])
def test_a_group_that_the_swept_presets_choose_cannot_be_overridden(tmp_path, override):
    # smd with distillation=anchor composes, and is shadow
    with pytest.raises(ConfigError, match=r"varies experiment, and tis, smd would lose the \w+ of its own"):
        plan_of(tmp_path, ARMS, override)


def test_nor_can_it_be_a_constant_of_the_file_or_of_its_command(tmp_path):
    fixed = with_parameters(ARMS, distillation={"value": "anchor"}, experiment={"values": ["tis", "smd"]})
    command = [*ARMS["command"][:4], "correction=mis", ARMS["command"][4]]
    for content in (fixed, ARMS | {"command": command}):
        with pytest.raises(ConfigError, match="the sweep varies experiment"):
            plan_of(tmp_path, content)


def test_other_groups_and_other_keys_of_the_preset_can_be_overridden(tmp_path):
    plan_of(tmp_path, ARMS, "task=recall", "correction.weight_fn.cap=3.0", "algorithm=rloo")
    with pytest.raises(ConfigError, match="rlhf would lose the task"):
        plan_of(tmp_path, with_parameters(experiment={"values": ["tis", "rlhf"]}), "task=recall")
    plan_of(tmp_path, GRID, "experiment=smd", "distillation=anchor")  # one arm, as the user wants it


def test_a_preset_tells_the_groups_that_it_chooses():
    assert groups_of("smd") == {"correction", "distillation"}
    assert groups_of("rlhf") == {"task", "algorithm", "roles", "reward", "correction", "distillation"}
    assert groups_of("none") == groups_of("no_such_preset") == set()


def test_overrides_are_ordered_by_their_key_and_the_last_of_one_key_stays_last():
    assert by_key(["seed=2", "+a=1", "seed=1"]) == ["+a=1", "seed=2", "seed=1"]
