"""What is refused before the first run."""

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.checking import cells_to_check, check_plan
from tests.sweeping.files import BAYES, GRID, plan_of, with_parameters


def test_all_combinations_are_checked_but_each_seed_only_once(tmp_path):
    content = with_parameters(seed={"values": [3, 4, 5]}, cache__budget={"values": [12, 16]})
    cells = cells_to_check(plan_of(tmp_path, content))
    assert [(cell["seed"], cell["cache.budget"]) for cell in cells] == [(3, 12), (3, 16), (4, 12), (5, 12)]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            with_parameters(cache__bugdet={"values": [12]}),
            "unknown key 'cache.bugdet': did you mean 'cache.budget'.*cache.bugdet=12",
        ),
        (
            with_parameters(experiment={"values": ["smd", "smb"]}),
            "experiment=smb is no option; choose one of dense.*experiment=smb",
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
            "distillation=x is no option",
        ),
        (
            with_parameters(optimizer__lr={"values": ["fast"]}),
            "optimizer.lr must be a number of at least 0, got fast",
        ),
        (with_parameters(BAYES, cache__budget={"min": 2, "max": 20}), "got 2; raise the budget"),
        (
            GRID | {"metric": {"name": "eval/acuracy"}},
            "'eval/acuracy' is logged by rl and eval of no run; did you mean 'eval/accuracy'",
        ),
        (
            GRID | {"metric": {"name": "rewrad"}},
            "metric='rewrad' is logged by rl and eval of no run; did you mean 'reward'",
        ),
        (
            with_parameters(
                GRID | {"metric": {"name": "dpo_loss"}}, algorithm={"values": ["online_dpo", "grpo"]}
            ),
            "metric=dpo_loss is not logged with these settings; .*algorithm=grpo",
        ),
        (
            GRID | {"early_terminate": {"type": "hyperband", "min_iter": 3}},
            "metric=eval/accuracy is known only at a run's end, too late for early_terminate",
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
    ],
)
def test_what_no_run_could_do_is_refused_before_the_first(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        check_plan(plan_of(tmp_path, content))


def test_a_misspelt_key_in_a_preset_is_found_too(tmp_path):
    # added by +, which composes, so that only the check of keys could refuse what nobody declares
    check_plan(plan_of(tmp_path, GRID, "+task.slips=[1]"))
    with pytest.raises(ConfigError, match="unexpected 'slops'"):
        check_plan(plan_of(tmp_path, GRID, "+task.slops=[1]"))


def test_names_with_any_part_are_known_by_the_dictionary(tmp_path):
    check_plan(plan_of(tmp_path, GRID | {"metric": {"name": "rewards/exact_match", "goal": "maximize"}}))
