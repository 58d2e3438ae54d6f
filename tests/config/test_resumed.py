"""A run that is resumed from its folder is checked as a new one is, and keeps its own labels."""

import pytest
from omegaconf import OmegaConf

from lit_rlkv.config import ConfigError, check_keys, composed, label_logger
from lit_rlkv.config.resumed import load_resumed_config, read_config
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.trust import trusting
from tests.config.test_composing import answers


def command_line(*arguments):
    """Return the config of a command line and its choices."""
    cfg = composed("config", arguments)
    choices = Choices(dict(cfg.hydra.runtime.choices), tuple(cfg.hydra.overrides.task))
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]), choices


def leave_run(folder, *arguments):
    """Leave the config and the choices of a run as fit does."""
    cfg, choices = command_line(*arguments)
    label_logger(cfg, choices.options, choices.overrides)
    folder.mkdir()
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    choices.save(folder)
    return folder


def resumed(folder, *arguments):
    """Return config and choices of the run as fit prepares them when it resumes."""
    cfg, given = command_line(f"resume={folder}", *arguments)
    _, cfg, choices = load_resumed_config(cfg, given)
    if choices is not None:
        label_logger(cfg, choices.options, choices.overrides)
    return cfg, choices


def labels(cfg):
    return cfg.logger.name, cfg.logger.get("group"), cfg.logger.get("tags")


def test_mistakes_of_a_resumed_run_are_told_before_torch_is_imported(tmp_path):
    run = leave_run(tmp_path / "run")
    for name, text in {"text": "no: [config", "other": "seed: 0\n", "binary": "\x00\xff"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text, encoding="latin-1")
    mistakes = {
        f"resume={tmp_path}/none": "is not a run folder (no config.yaml there); give one under runs/",
        f"resume={tmp_path}/text": "text/config.yaml cannot be used: ",
        f"resume={tmp_path}/other": "other/config.yaml cannot be used: task must name its class",
        f"resume={tmp_path}/binary": "binary/config.yaml cannot be used: ",
        f"resume={run} seed=3": "another config, which cannot change on resume",
        f"resume={run} foo=1": "unknown key 'foo': docs/reference/config.md has all keys",
        f"resume={run} cache.bugdet=3 seed=3": "unknown key 'cache.bugdet': did you mean 'cache.budget'?",
        f"resume={run} experiment=tis": "experiment=tis: a resumed run takes no preset",
        f"resume={run} +diagnostics.gradent=null": "diagnostics.gradient",
    }
    said = answers(mistakes, tmp_path)
    assert len(said) == len(mistakes)
    assert [line for line, says in zip(said, mistakes.values(), strict=True) if says not in line] == []


def test_a_run_is_extended_only_if_its_learning_rate_is_constant(tmp_path):
    folder = leave_run(tmp_path / "linear")
    with pytest.raises(ConfigError, match=r"(?s)-> 999\n.* only with algorithm.lr_schedule=constant"):
        resumed(folder, "algorithm.n_iterations=999")
    folder = leave_run(tmp_path / "constant", "algorithm.lr_schedule=constant")
    assert resumed(folder, "algorithm.n_iterations=999")[0].algorithm.n_iterations == 999


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


def test_keys_of_the_options_that_the_run_chose_are_still_known(tmp_path):
    folder = leave_run(tmp_path / "run", "logger=wandb", "logger.project=mine")
    given = command_line(f"resume={folder}")[1]
    choices = Choices.load(folder).with_more(given)
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
        ("cache.policy_options.value_norms=true", "callbacks.keep_best=2"),
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
    Choices({}, ("seed=3", "trusted_modules=[mypackage]")).save(tmp_path)
    assert Choices.load(tmp_path) == Choices({}, ("seed=3",))


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


def change(folder, **nodes):
    """Change nodes of a saved config; None takes one away."""
    cfg = OmegaConf.load(folder / "config.yaml")
    for key, value in nodes.items():
        cfg.pop(key) if value is None else OmegaConf.update(cfg, key, value, merge=False)
    OmegaConf.save(cfg, folder / "config.yaml")


@pytest.mark.parametrize(
    ("correction", "expected"), [("shadow", True), ("dense", True), ("naive", False), ("tis", False)]
)
def test_a_run_from_before_bypass_mode_is_resumed_with_what_its_correction_says(
    tmp_path, correction, expected
):
    folder = leave_run(tmp_path / "run", f"correction={correction}", "distillation=none")
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.correction.pop("bypass_mode") is expected
    OmegaConf.save(saved, folder / "config.yaml")
    assert resumed(folder)[0].correction.bypass_mode is expected


def test_a_key_that_is_newer_than_a_run_gets_its_default(tmp_path):
    folder = leave_run(tmp_path / "run", "seed=3")
    change(folder, evaluation=None, logger=None, stages=None)
    cfg = read_config(folder)
    assert (cfg.evaluation.n_mismatch, cfg.logger, cfg.seed) == (128, None, 3)
    assert list(cfg.stages) == ["sft", "rl", "eval"]
    change(folder, distillation=None)
    with pytest.raises(ConfigError, match="distillation must name its class"):
        read_config(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rollout.top_p", "x[/y]", r"rollout\.top_p must be a number"),
        ("reward.functions", [1], "Cannot merge"),
        ("optimizer", {"lr": 1}, "optimizer must name its class or function in _target_, got null"),
        ("logger", "csv", "logger must be a mapping or null, got csv"),
        ("diagnostics.cache", [1], r"diagnostics\.cache must name its class or function in _target_"),
    ],
)
def test_a_damaged_config_is_refused_with_the_key(tmp_path, key, value, says):
    folder = leave_run(tmp_path / "run")
    change(folder, **{key: value})
    with pytest.raises(ConfigError, match=rf"config\.yaml cannot be used: .*{says}.*; restore it if"):
        resumed(folder)


@pytest.mark.parametrize("key", ["model.path", "logger.name", "diagnostics.cache.every"])
@pytest.mark.parametrize("value", ["${oc.env:LIT_RLKV_SECRET}", "${seed}"])
def test_a_saved_config_reads_no_environment_and_no_other_key(tmp_path, monkeypatch, key, value):
    monkeypatch.setenv("LIT_RLKV_SECRET", "secret")
    folder = leave_run(tmp_path / "run", "logger=wandb")
    change(folder, **{key: value})
    with pytest.raises(ConfigError, match=rf"{key}=\$\{{") as found:
        read_config(folder)
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it has no keys"),
        ("[1, 2]", "it has no keys"),
        ("a: " + "[" * 2000 + "]" * 2000, "maximum recursion depth"),
        ("a: &a [x]\nb: *a", "line 2 has an alias"),
        ("a: ${no.such}", "a=${no.such}"),
        ("a: '${'", "full_key: a"),
        ("a: [{b: x}, {b: 'x${oc.env:HOME}'}]", "${oc.env:HOME}"),
        ('a: "\\x24{oc.env:HOME}"', "a=${oc.env:HOME}"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, text, says):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be used: ") as found:
        read_config(tmp_path)
    assert says in str(found.value)
    assert "\n" not in str(found.value)


def test_a_saved_logger_of_another_package_writes_only_if_the_command_line_says_so(tmp_path):
    folder = leave_run(tmp_path / "run", "logger=lightning_csv")
    with pytest.raises(ConfigError, match=r"CSVLogger of the saved config may write anywhere; .*logger=csv"):
        resumed(folder, "logger.name=other")
    assert resumed(folder, "logger=csv")[0].logger is None
    assert resumed(folder, "logger=lightning_csv", "logger.name=other")[0].logger.name == "other"
    change(folder, **{"logger": {"_target_": "mine.Logger"}})
    with pytest.raises(ConfigError, match="may write anywhere"):
        resumed(folder)
    with trusting(["mine"]):
        assert resumed(folder)[0].logger._target_ == "mine.Logger"
