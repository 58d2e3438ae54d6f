"""Options of the package that can be set by name, without a `+`."""

import inspect

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object

from lit_rlkv.config import CONF_DIR

TASKS = ["gsm8k", "word_problems", "dataset"]
REWARDS = ["endpoint", "math", "numeric", "python"]


@pytest.fixture
def compose_only():
    """Composes, and checks nothing: what has no default may be missing."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        yield lambda *overrides: compose("config", overrides=[*overrides])


def not_declared(node):
    takes = inspect.signature(get_object(node._target_)).parameters
    return [name for name in takes if name not in node.keys()]  # noqa: SIM118  `in node` leaves out ???


@pytest.mark.parametrize("task", TASKS)
def test_a_task_declares_all_that_it_takes(task, compose_only):
    assert not_declared(compose_only(f"task={task}").task) == []


@pytest.mark.parametrize("reward", REWARDS)
def test_reward_functions_declare_all_that_they_take(reward, compose_only):
    cfg = compose_only(f"reward={reward}")
    assert [name for node in cfg.reward.functions.values() for name in not_declared(node)] == []


def test_declared_options_are_the_defaults(compose_only):
    for reward in REWARDS:
        for name, node in compose_only(f"reward={reward}").reward.functions.items():
            takes = inspect.signature(get_object(node._target_)).parameters
            for option in ("timeout_s", "n_workers", "retries", "float_rounding", "group"):
                assert option not in takes or node[option] == takes[option].default, (reward, name, option)
