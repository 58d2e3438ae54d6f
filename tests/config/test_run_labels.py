"""Names of a run in loggers that show many."""

import pytest

from lit_rlkv.config import composed, label_logger


def labelled(*arguments):
    """Return name, group and tags of the logger as fit fills them in."""
    cfg = composed("config", arguments)
    label_logger(cfg, cfg.hydra.runtime.choices, cfg.hydra.overrides.task)
    return cfg.logger


def test_a_run_is_named_by_experiment_task_model_and_seed_and_its_group_by_all_but_the_seed():
    logger = labelled("logger=wandb", "experiment=tis", "task=recall", "seed=3")
    assert (logger.name, logger.group) == ("tis-recall-tiny-seed3", "tis-recall-tiny")
    assert logger.tags == ["tis", "recall", "tiny", "seed3"]


def test_what_the_user_gives_stays():
    logger = labelled("logger=wandb", "logger.name=mine", "logger.group=ours", "logger.tags=[]")
    assert (logger.name, logger.group, logger.tags) == ("mine", "ours", [])
    assert labelled("logger=wandb", "logger.name=mine").group == "smd-chain_sum-tiny"


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        (["model.path=Qwen/Qwen2.5-0.5B-Instruct", "recipe=llm"], "smd-chain_sum-Qwen2.5-0.5B-Instruct"),
        (["model.path=models/mine/"], "smd-chain_sum-mine"),
        (["correction=tis", "cache.budget=12"], "smd-correction=tis-chain_sum-tiny"),
        (["experiment=none", "correction=tis"], "correction=tis-chain_sum-tiny"),
        (["experiment=none"], "none-chain_sum-tiny"),
    ],
)
def test_the_model_is_its_folder_and_a_changed_arm_is_named(arguments, group):
    assert labelled("logger=wandb", *arguments).group == group


def test_tensorboard_has_a_folder_of_that_name_and_loggers_of_others_are_left_alone():
    assert labelled("logger=tensorboard").name == "smd-chain_sum-tiny-seed0"
    assert "group" not in labelled("logger=tensorboard")
    assert labelled("logger=lightning_csv").name == "lightning_csv"
    assert labelled("logger=custom", "logger._target_=mine.Logger", "+logger.name=null").name is None
    assert labelled("logger=csv") is None


def test_a_tag_is_as_short_as_wandb_wants_it():
    (tag,) = [tag for tag in labelled("logger=wandb", f"model.path={'a' * 100}").tags if tag[0] == "a"]
    assert tag == "a" * 64
