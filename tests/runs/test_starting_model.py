"""The files that identify the starting model of a checkpoint."""

from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.runs.checkpoint import Checkpoint
from lit_rlkv.runs.starting_model import (
    REWARD_HEAD,
    REWARD_MODEL,
    backbone_id,
    check_backbone,
    load_reward_head,
    sft_model_dir,
)
from tests.whole_runs import config

MODEL = "model.safetensors"
LOADED = [MODEL, REWARD_HEAD, f"{REWARD_MODEL}/{MODEL}", f"{REWARD_MODEL}/{REWARD_HEAD}"]
OTHERS = ["checkpoint-500/model.safetensors", "runs/a/checkpoints/iteration-000001/trainable.safetensors"]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.fixture
def start(tmp_path):
    for name in LOADED:
        write(tmp_path / name, "weights")
    return tmp_path


@pytest.mark.parametrize("name", LOADED)
def test_each_file_that_is_loaded_counts(start, name):
    saved = Checkpoint(Path("iteration-000001"), 1, {}, backbone=backbone_id(start))
    check_backbone(saved, start, backbone_id(start))
    write(start / name, "others!")
    with pytest.raises(ConfigError, match="was trained on other weights than those in"):
        check_backbone(saved, start, backbone_id(start))


@pytest.mark.parametrize("name", OTHERS)
def test_models_and_runs_below_the_folder_do_not_count(start, name):
    known = backbone_id(start)
    write(start / name, "others")
    assert backbone_id(start) == known


def test_a_damaged_reward_head_is_named(tmp_path):
    assert load_reward_head(tmp_path) is None
    (tmp_path / REWARD_HEAD).write_bytes(b"[1]\n")
    with pytest.raises(ConfigError, match=f"{REWARD_HEAD} is damaged .* restore it"):
        load_reward_head(tmp_path)


def test_a_folder_without_weights_of_its_own_is_refused(tmp_path):
    write(tmp_path / OTHERS[0], "others")
    with pytest.raises(ConfigError, match="holds no weights"):
        backbone_id(tmp_path)


def test_sft_models_of_other_environments_are_others(tmp_path):
    plain, with_tools = ([], ["environment=tools", "environment.role=null"])
    folders = [
        sft_model_dir(config(tmp_path, *overrides, *options))
        for overrides in (plain, with_tools)
        for options in ([], ["rollout.n_prompts=4"])
    ]
    assert folders[0] == folders[1] != folders[2] == folders[3]
