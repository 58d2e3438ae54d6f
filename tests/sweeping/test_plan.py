"""Command lines and configs of a sweep's runs, and the checks before the first one."""

from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.plan import by_key, cells_to_check, check_plan, groups_of
from tests.sweeping.files import BAYES, GRID, plan_of, with_parameters
from tests.tiers import every_nth


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


def test_threads_of_the_file_are_kept_and_options_of_its_logger_go_with_it(tmp_path):
    content = with_parameters(
        seed={"values": [0, 1]},
        fabric={"parameters": {"n_threads": {"value": 4}}},
        logger={"value": "wandb"},
    )
    content["parameters"]["logger.tags"] = {"value": ["a"]}
    plan = plan_of(tmp_path, content)
    cfg = plan.compose({"seed": 1}, tmp_path / "x").cfg
    assert (cfg.fabric.n_threads, cfg.logger) == (4, None)
    check_plan(plan)
    on_wandb = replace(plan, on_wandb=True)
    check_plan(on_wandb)
    cfg = on_wandb.compose({"seed": 1}, tmp_path / "x").cfg
    assert (cfg.fabric.n_threads, cfg.logger.tags) == (4, ["a"])
    kept = plan_of(tmp_path, content, "logger=wandb").compose({"seed": 1}, tmp_path / "x").cfg
    assert kept.logger.tags == ["a"]


def test_options_of_wandb_are_known_to_a_sweep_on_wandb_alone(tmp_path):
    plan = plan_of(tmp_path, GRID, "logger.project=mine")
    check_plan(replace(plan, on_wandb=True))
    with pytest.raises(ConfigError, match=r"unknown key 'logger\.project'"):
        check_plan(plan)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=3", "seed=3: the sweep itself varies seed"),
        ("resume=runs/x", "a sweep gives every run a folder of its own"),
        ("hydra.run.dir=x", "a sweep gives every run a folder of its own"),
        ("smd", "an override must be key=value, got 'smd'"),
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


def test_constants_and_the_command_cannot_override_groups_of_presets(tmp_path):
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


def test_all_combinations_are_checked_but_each_seed_only_once(tmp_path):
    content = with_parameters(seed={"values": [3, 4, 5]}, cache__budget={"values": [12, 16]})
    cells = cells_to_check(plan_of(tmp_path, content))
    assert [(cell["seed"], cell["cache.budget"]) for cell in cells] == [(3, 12), (3, 16), (4, 12), (5, 12)]


MISTAKES = [
    (
        with_parameters(cache__bugdet={"values": [12]}),
        "unknown key 'cache.bugdet': did you mean 'cache.budget'.*cache.bugdet=12",
    ),
    (
        with_parameters(experiment={"values": ["smd", "smb"]}),
        "experiment must be one of dense.*got smb.*experiment=smb",
    ),
    (
        with_parameters(cache__budget={"values": [16, 4]}),
        "got 4; raise the budget.*cache.budget=4",
    ),
    (
        with_parameters(cache={"parameters": {"policy": {"values": ["lru"]}}}),
        "unknown cache policy 'lru'",
    ),
    (
        with_parameters(seed={"values": [0, 1]}, distillation={"values": ["none", "x"]}),
        "distillation must be one of .*got x",
    ),
    (
        with_parameters(optimizer__lr={"values": ["fast"]}),
        "optimizer.lr must be a number above 0, got fast",
    ),
    (with_parameters(BAYES, cache__budget={"min": 2, "max": 20}), "got 2; raise the budget"),
    (
        GRID | {"metric": {"name": "eval/acuracy"}},
        "'eval/acuracy' is logged by no run in rl or eval; did you mean 'eval/accuracy'",
    ),
    (
        GRID | {"metric": {"name": "rewrad"}},
        "metric='rewrad' is logged by no run in rl or eval; did you mean 'reward'",
    ),
    (
        with_parameters(
            GRID | {"metric": {"name": "dpo_loss"}}, algorithm={"values": ["online_dpo", "grpo"]}
        ),
        "metric=dpo_loss is not logged with these settings; .*algorithm=grpo",
    ),
    (
        GRID | {"early_terminate": {"type": "hyperband", "min_iter": 3}},
        "metric=eval/accuracy is logged only at a run's end, too late for early_terminate",
    ),
    (
        with_parameters(seed={"values": [0]}, stages={"value": ["sft", "rl"]}),
        "metric=eval/accuracy needs eval in stages",
    ),
    (
        with_parameters(
            GRID | {"metric": {"name": "reward"}}, seed={"values": [0]}, stages={"value": ["sft"]}
        ),
        "metric=reward is logged by rl",
    ),
    (
        with_parameters(
            GRID | {"metric": {"name": "eval/accuracy_gain"}},
            seed={"values": [0]},
            stages={"value": ["sft", "eval"]},
        ),
        "needs rl and eval in stages",
    ),
]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(("content", "says"), every_nth(3, MISTAKES))
def test_mistakes_are_refused_before_the_first_run(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        check_plan(plan_of(tmp_path, content))


def test_a_misspelt_key_in_a_preset_is_found_too(tmp_path):
    # added by +, which composes, so that only the check of keys could refuse what nobody declares
    check_plan(plan_of(tmp_path, GRID, "+task.slips=[1]"))
    with pytest.raises(ConfigError, match="unexpected 'slops'"):
        check_plan(plan_of(tmp_path, GRID, "+task.slops=[1]"))


def test_names_with_any_part_are_known_by_the_dictionary(tmp_path):
    check_plan(plan_of(tmp_path, GRID | {"metric": {"name": "rewards/exact_match", "goal": "maximize"}}))
