"""What a command line of Hydra may say, and what is said where it may not."""

import pytest

from lit_rlkv.config import ConfigError, check_command_line
from tests.config.asking import refusal


@pytest.mark.parametrize(
    "arguments",
    [["-m", "seed=1,2"], ["--multirun", "experiment=tis,mis"], ["experiment=tis,mis"]],
    ids=" ".join,
)
def test_several_runs_are_sent_to_the_sweep(arguments):
    with pytest.raises(ConfigError, match=r"several runs are a sweep; .* python -m lit_rlkv\.sweep FILE"):
        check_command_line("config", arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experiment", "tis"], "'--experiment' sets nothing; write experiment=tis"),
        (["experiment", "tis"], "'experiment' sets nothing; write experiment=tis"),
        (["seed", "3"], "'seed' sets nothing; write seed=..."),
        (["tis"], "'tis' sets nothing; write tis=..."),
    ],
)
def test_a_setting_without_its_sign_is_shown_with_it(arguments, says):
    assert refusal(*arguments) == says


@pytest.mark.parametrize("view", [["--cfg", "job"], ["-c", "all", "--resolve"], ["--cfg=job"]], ids=" ".join)
def test_a_look_at_the_config_is_held_to_what_exists(view):
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm\.group_size'"):
        check_command_line("config", ["algorithm.num_generations=4", *view])
    assert check_command_line("config", ["seed=3", *view]).seed == 3


def test_what_hydra_alone_answers_is_left_to_it():
    assert check_command_line("config", ["--help"]) is None
    assert check_command_line("config", ["--info", "defaults"]) is None
