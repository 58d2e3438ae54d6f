"""Finding the run to resume, and refusing another config."""

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lit_rlkv.config import ConfigError, composed
from lit_rlkv.config.resumed import check_same_config, differences, load_resumed_config
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.run_files import CHECKPOINTS, CONFIG, REPORT
from lit_rlkv.runs.checkpoint import Checkpoint
from lit_rlkv.runs.lock import BusyError, FolderLock
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.resume import config_to_save, is_done, warn_of_other_ranks
from lit_rlkv.runs.resume import find_resumable_run as found_by
from lit_rlkv.trust import trusting
from tests.tiers import short_tier
from tests.whole_runs import TINY


def asked(folder, *overrides):
    cfg = composed("config", [*TINY, f"runs_dir={folder}", *overrides])
    del cfg.hydra
    return cfg


def given(*overrides):
    return Choices({}, overrides)


def found(cfg, run_dir):
    with FolderLock() as lock:
        return found_by(cfg, run_dir, lock)


def leave_run(folder, name, *overrides, finished=False, at=0):
    run = folder / name
    run.mkdir()
    OmegaConf.save(asked(folder, *overrides), run / CONFIG, resolve=True)
    os.utime(run / CONFIG, (at, at))
    if finished:
        (run / REPORT).touch()
        n_iterations = OmegaConf.load(run / CONFIG).algorithm.n_iterations
        (run / CHECKPOINTS / f"iteration-{n_iterations:06d}").mkdir(parents=True)
    return run


def test_settings_without_effect_on_training_may_differ(tmp_path):
    saved = asked(tmp_path)
    changes = ["logger=tensorboard", "diagnostics=none", "callbacks.keep_best=1", "fabric.devices=2"]
    assert differences(saved, asked(tmp_path, *changes)) == {}
    assert differences(saved, asked(tmp_path, "fabric.precision=bf16-mixed", "cache.budget=6")) == {
        "cache.budget": (7, 6),
        "fabric.precision": ("32-true", "bf16-mixed"),
    }
    assert differences(saved, asked(tmp_path, "distillation=none", "experiment=none"))["distillation"] == (
        "nothing",
        None,
    )


def test_more_iterations_are_another_run_where_the_learning_rate_falls_towards_the_last(tmp_path):
    more = "algorithm.n_iterations=9"
    assert "algorithm.n_iterations" in differences(asked(tmp_path), asked(tmp_path, more))
    constant = "algorithm.lr_schedule=constant"
    assert differences(asked(tmp_path, constant), asked(tmp_path, constant, more)) == {}
    says = r"2 -> 9\n.*algorithm\.lr_schedule=constant.* python -m lit_rlkv\.export ckpt=run "
    with pytest.raises(ConfigError, match=says):
        check_same_config(asked(tmp_path), asked(tmp_path, more), Path("run"))


@pytest.mark.parametrize(
    ("options", "may_change"),
    [([], True), (["algorithm.curriculum.decay=0.5"], False), (["sft.on_policy_pairs.n_prompts=4"], False)],
)
def test_what_evaluations_count_as_correct_may_change_unless_training_reads_it(tmp_path, options, may_change):
    changed = asked(tmp_path, *options, "reward.accuracy=environment")
    assert (differences(asked(tmp_path, *options), changed) == {}) is may_change


def test_auto_finds_the_newest_unfinished_run_with_this_config(tmp_path):
    cfg, new = asked(tmp_path), tmp_path / "new"
    assert found(cfg, new) is None
    leave_run(tmp_path, "old", at=1)
    wanted = leave_run(tmp_path, "wanted", at=2)
    leave_run(tmp_path, "other", "seed=3", at=3)
    leave_run(tmp_path, "done", finished=True, at=4)
    assert found(cfg, new) == wanted
    assert found(asked(tmp_path, "seed=4"), new) is None


CLIPPED = ("algorithm.loss.delta", "algorithm.loss.importance_sampling_level")
NEWER_THAN_SOME_RUNS = {
    "algorithm=grpo": ("algorithm.advantage.top_entropy_quantile", *CLIPPED),
    "algorithm=ppo": CLIPPED,
    "algorithm=reinforce++_plain": (*CLIPPED, "algorithm.advantage.greedy_baseline"),
    "algorithm=gspo": ("algorithm.advantage.top_entropy_quantile",),
    "algorithm=rloo": (
        "algorithm.entropy_coef", "algorithm.kl.bias_correction", "correction.bypass_mode",
        "rollout.min_p", "rollout.n_splits", "rollout.compile_layers", "rollout.replay_routing",
        "evaluation.top_k", "evaluation.top_p", "evaluation.min_p", "fabric.tokens_per_pass",
    ),
}  # fmt: skip


def leave_without(folder, key, algorithm):
    run = leave_run(folder, key, algorithm)
    saved = OmegaConf.load(run / CONFIG)
    node, _, name = key.rpartition(".")
    OmegaConf.select(saved, node).pop(name)
    OmegaConf.save(saved, run / CONFIG)
    return run


@pytest.mark.parametrize("algorithm", short_tier(NEWER_THAN_SOME_RUNS, ["algorithm=ppo"]))
def test_auto_finds_a_run_from_before_a_key_existed(tmp_path, algorithm):
    for key in NEWER_THAN_SOME_RUNS[algorithm]:
        (tmp_path / key).mkdir()
        run = leave_without(tmp_path / key, key, algorithm)
        assert found(asked(tmp_path / key, algorithm), tmp_path / "new") == run, key
        assert found(asked(tmp_path / key, algorithm), run) == run, key


def test_an_argument_that_is_missing_has_its_default_and_no_other_value(tmp_path):
    key = "algorithm.loss.importance_sampling_level"
    leave_without(tmp_path, key, "algorithm=gspo")  # which sets it to sequence
    assert found(asked(tmp_path, "algorithm=gspo"), tmp_path / "new") is None
    run = leave_without(tmp_path, "algorithm.loss.delta", "algorithm=grpo")
    assert found(asked(tmp_path, "algorithm.loss.delta=2"), tmp_path / "new") is None
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.delta: None -> 2"):
        found(asked(tmp_path, "algorithm.loss.delta=2"), run)
    leave_without(tmp_path, "algorithm.loss.clip_low", "algorithm=grpo")  # has no default
    os.rename(run / CONFIG, run / "gone")
    assert found(asked(tmp_path), tmp_path / "new") is None


def test_a_run_with_iterations_left_is_not_done_by_an_earlier_report(tmp_path):
    constant = "algorithm.lr_schedule=constant"
    run = leave_run(tmp_path, "run", constant, finished=True)
    assert is_done(run)
    longer = asked(tmp_path, constant, "algorithm.n_iterations=9")
    OmegaConf.save(longer, run / CONFIG, resolve=True)
    assert not is_done(run)
    assert found(longer, tmp_path / "new") == run
    looked_at = leave_run(tmp_path, "looked-at")
    (looked_at / REPORT).touch()
    assert not is_done(looked_at)


def test_a_look_at_a_run_takes_no_stage_from_it(tmp_path):
    run = leave_run(tmp_path, "run", "stages=[sft,rl]")
    assert config_to_save(asked(tmp_path, "stages=[eval]"), run).stages == ["sft", "rl", "eval"]
    assert config_to_save(asked(tmp_path, "stages=[eval]"), tmp_path / "new").stages == ["eval"]


def test_auto_leaves_a_run_to_the_process_that_is_at_work_on_it_and_begins_no_other(tmp_path):
    cfg, new = asked(tmp_path), tmp_path / "new"
    older, newer = leave_run(tmp_path, "older", at=1), leave_run(tmp_path, "newer", at=2)
    with FolderLock() as first, FolderLock() as second, FolderLock() as third:
        assert found_by(cfg, new, first) == newer
        assert found_by(cfg, new, second) == older
        with pytest.raises(BusyError, match=f"older: process {os.getpid()} on"):
            found_by(cfg, new, third)
        with pytest.raises(BusyError, match="new: process"), FolderLock() as fourth:
            found_by(cfg, new, fourth)
    assert found(cfg, new) == newer
    assert list(new.iterdir()) == []


def test_auto_resumes_in_the_given_folder_and_refuses_another_run_there(tmp_path):
    run = leave_run(tmp_path, "mine")
    assert found(asked(tmp_path), run) == run
    with pytest.raises(ConfigError, match=r"another config(.|\n)*cache\.budget: 7 -> 6"):
        found(asked(tmp_path, "cache.budget=6"), run)


def test_a_resumed_run_takes_changes_only_of_keys_that_may_change(tmp_path):
    run = leave_run(tmp_path, "mine", "seed=5")
    cfg = asked(tmp_path, f"resume={run}", "callbacks.keep_best=2")
    folder, gone_on, _ = load_resumed_config(cfg, given(f"resume={run}", "callbacks.keep_best=2"))
    assert folder == run
    assert (gone_on.seed, gone_on.callbacks.keep_best) == (5, 2)
    with pytest.raises(ConfigError, match="seed: 5 -> 6"):
        load_resumed_config(asked(tmp_path, f"resume={run}", "seed=6"), given(f"resume={run}", "seed=6"))
    with pytest.raises(ConfigError, match="a resumed run takes no preset"):
        load_resumed_config(cfg, given(f"resume={run}", "experiment=tis"))


def test_a_service_of_a_saved_run_is_resumed_only_if_the_command_line_trusts_it(tmp_path):
    run = leave_run(tmp_path, "mine", "reward=endpoint", "reward.functions.custom.url=http://there/")
    cfg = asked(tmp_path, f"resume={run}")
    with pytest.raises(ConfigError, match=r"trusted_modules=\['http://there/'\]"):
        load_resumed_config(cfg, given(f"resume={run}"))
    with trusting(["http://there/"]):
        assert load_resumed_config(cfg, given(f"resume={run}"))[0] == run


def gone_on(folder, run, *overrides):
    """The config of a run that is gone on with."""
    overrides = [f"resume={run}", *overrides]
    return load_resumed_config(asked(folder, *overrides), given(*overrides))[1]


def test_a_group_that_is_chosen_takes_the_place_of_the_runs_own(tmp_path):
    run = leave_run(tmp_path, "mine", "logger=wandb", "logger.project=mine")
    cfg = gone_on(tmp_path, run, "diagnostics=none", "logger=tensorboard", "logger.figures_every=3")
    assert cfg.diagnostics == {}
    assert cfg.logger == asked(tmp_path, "logger=tensorboard", "logger.figures_every=3").logger
    checked_config(cfg)
    assert gone_on(tmp_path, run, "logger=csv").logger is None
    assert gone_on(tmp_path, run, "~diagnostics.gradient").diagnostics.gradient is None
    assert gone_on(tmp_path, run, "seed=0").logger.project == "mine"


@pytest.mark.parametrize("without", ["diagnostics.gradient=null", "diagnostics=none"])
def test_a_setting_of_what_the_run_left_out_brings_it_whole(tmp_path, without):
    run = leave_run(tmp_path, "mine", without)
    cfg = gone_on(tmp_path, run, "diagnostics.gradient.every=5", "diagnostics.layers.every=7")
    assert cfg.diagnostics.gradient == asked(tmp_path, "diagnostics.gradient.every=5").diagnostics.gradient
    assert (cfg.diagnostics.layers.every, cfg.diagnostics.layers.n_rows) == (7, 8)
    checked_config(cfg)


@pytest.mark.parametrize(("n_ranks", "says"), [(2, ""), (4, "had 2 processes and resumes with 4: prompts")])
def test_resuming_with_another_number_of_ranks_warns(caplog, n_ranks, says):
    warn_of_other_ranks(Checkpoint(Path("iteration-000001"), 1, {}, n_ranks=2), n_ranks)
    assert says in caplog.text
    assert bool(caplog.text) == bool(says)
