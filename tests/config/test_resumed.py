"""A run that is resumed from its folder is checked as a new one is, and keeps its own labels."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from lit_rlkv.config import ConfigError, check_command_line, check_keys, label_logger
from lit_rlkv.config.resumed import load_resumed_config, read_config, resumed_choices
from lit_rlkv.config.run_labels import Choices
from tests.config.test_mistakes import ROOT, SCRIPT


def composed(*arguments):
    """Return the config of a command line and its choices."""
    cfg = check_command_line("config", arguments)
    choices = Choices(dict(cfg.hydra.runtime.choices), list(cfg.hydra.overrides.task))
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]), choices


def leave_run(folder, *arguments):
    """Leave the config and the choices of a run as fit does."""
    cfg, choices = composed(*arguments)
    label_logger(cfg, choices.options, choices.overrides)
    folder.mkdir()
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    choices.save(folder)
    return folder


def resumed(folder, *arguments):
    """Return config and choices of the run as fit prepares them when it resumes."""
    cfg, given = composed(f"resume={folder}", *arguments)
    _, cfg = load_resumed_config(cfg, given.overrides)
    choices = resumed_choices(folder, given)
    if choices is not None:
        check_keys(cfg, choices.options, choices.overrides)
        label_logger(cfg, choices.options, choices.overrides)
    return cfg, choices


def labels(cfg):
    return cfg.logger.name, cfg.logger.get("group"), cfg.logger.get("tags")


def test_mistakes_of_a_resumed_run_are_told_before_torch_is_imported(tmp_path):
    leave_run(tmp_path / "gpu", "fabric.accelerator=gpu")
    for name, text in {"text": "no: [config", "other": "seed: 0\ntask: 3\n", "binary": "\x00\xff"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text, encoding="latin-1")
    mistakes = {
        f"resume={tmp_path}/none": "is not a run folder (no config.yaml there); give one under runs/",
        f"resume={tmp_path}/text": "text/config.yaml cannot be read: ",
        f"resume={tmp_path}/other": "other/config.yaml is damaged, as it lacks task, model, cache, ",
        f"resume={tmp_path}/binary": "binary/config.yaml cannot be read: ",
        f"resume={tmp_path}/gpu": "fabric.accelerator=gpu needs a GPU, and this machine shows none",
        f"resume={tmp_path}/gpu seed=3": "another config, which cannot change on resume",
        f"resume={tmp_path}/gpu experiment=tis": "experiment=tis: a resumed run takes no preset",
        f"resume={tmp_path}/gpu +diagnostics.gradent=null": "did you mean 'diagnostics.gradient'?",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(mistakes),
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(said) == len(mistakes)
    assert [line for line, says in zip(said, mistakes.values(), strict=True) if says not in line] == []


def test_a_run_keeps_its_labels_when_it_is_resumed(tmp_path):
    folder = leave_run(tmp_path / "run", "logger=wandb", "experiment=tis", "task=recall", "seed=3")
    cfg, choices = resumed(folder)
    assert labels(cfg) == ("tis-recall-tiny-seed3", "tis-recall-tiny", ["tis", "recall", "tiny", "seed3"])
    assert (choices.options["experiment"], choices.options["task"]) == ("tis", "recall")
    assert labels(resumed(folder, "logger=tensorboard")[0])[0] == "tis-recall-tiny-seed3"


def test_a_logger_that_the_run_did_not_have_gets_the_labels_of_the_run(tmp_path):
    folder = leave_run(tmp_path / "run", "experiment=none", "correction=tis", "seed=3")
    cfg, choices = resumed(folder, "logger=wandb", "logger.tags=[mine]")
    assert labels(cfg) == ("correction=tis-chain_sum-tiny-seed3", "correction=tis-chain_sum-tiny", ["mine"])
    assert choices.options["logger"] == "wandb"


def test_labels_that_the_user_gave_the_run_stay_if_its_logger_is_chosen_again(tmp_path):
    folder = leave_run(tmp_path / "run", "logger=wandb", "logger.name=mine")
    assert labels(resumed(folder, "logger=wandb")[0])[0] == "mine"
    assert labels(resumed(folder, "logger=wandb", "logger.name=other")[0])[0] == "other"


def test_keys_of_the_options_that_the_run_chose_are_still_known(tmp_path):
    folder = leave_run(tmp_path / "run", "reward=python", "reward.functions.custom.path=f.py:g")
    given = composed(f"resume={folder}")[1]
    choices = resumed_choices(folder, given)
    check_keys(read_config(folder), choices.options, choices.overrides)
    with pytest.raises(ConfigError, match="unknown key"):  # the control: the options of this command line
        check_keys(read_config(folder), given.options, given.overrides)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("diagnostics=none", "diagnostics.gradient.every=5"),
        ("diagnostics.gradient=null", "diagnostics.gradient.every=5"),
        ("diagnostics.gradient=null", "diagnostics=none"),
        ("logger=wandb", "+logger.project=mine"),
        ("logger=csv", "logger=tensorboard"),
        ("seed=1", "~diagnostics.gradient"),
        ("cache.policy_options={}", "callbacks.keep_best=2"),
    ],
)
def test_settings_that_may_change_are_known_whatever_the_run_left_out(tmp_path, first, later):
    resumed(leave_run(tmp_path / "run", first), later)


def test_a_run_of_an_earlier_version_has_no_choices_and_is_resumed(tmp_path):
    folder = leave_run(tmp_path / "run", "logger=wandb", "seed=3")
    (folder / "choices.json").unlink()
    cfg, choices = resumed(folder)
    assert choices is None
    assert labels(cfg)[0] == "smd-chain_sum-tiny-seed3"


def test_trust_in_modules_is_not_saved(tmp_path):
    Choices({}, ["seed=3", "trusted_modules=[mypackage]"]).save(tmp_path)
    assert Choices.load(tmp_path) == Choices({}, ["seed=3"])


@pytest.mark.parametrize(
    ("first", "later"), [("logger=csv", "logger=wandb"), ("diagnostics=none", "diagnostics=default")]
)
def test_a_run_can_be_resumed_again_after_a_resume_that_changed_a_group(tmp_path, first, later):
    folder = leave_run(tmp_path / "run", first)
    cfg, choices = resumed(folder, later)
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    before = (folder / "choices.json").read_text()
    choices.save(folder)  # as fit does at every start
    again, _ = resumed(folder)
    group = later.partition("=")[0]
    assert again[group] == cfg[group]
    # the control: with the choices of the first command line alone the keys are unknown
    (folder / "choices.json").write_text(before)
    with pytest.raises(ConfigError, match="unknown key"):
        resumed(folder)
