"""Hydra's command lines: composition and refusals."""

import pytest

from lit_rlkv.config import ConfigError, check_command_line


@pytest.mark.parametrize(
    "arguments",
    [["-m", "seed=1,2"], ["--multirun", "experiment=tis,mis"], ["experiment=tis,mis"]],
    ids=" ".join,
)
def test_several_runs_are_sent_to_the_sweep(arguments):
    with pytest.raises(ConfigError, match=r"several runs are a sweep; .* python -m lit_rlkv\.sweep FILE"):
        check_command_line("config", arguments)


@pytest.mark.parametrize("view", [["--cfg", "job"], ["-c", "all", "--resolve"], ["--cfg=job"]], ids=" ".join)
def test_a_look_at_the_config_is_held_to_what_exists(view):
    with pytest.raises(ConfigError, match=r"write 'algorithm\.group_size'"):
        check_command_line("config", ["algorithm.num_generations=4", *view])
    assert check_command_line("config", ["seed=3", *view]).seed == 3


def test_options_of_hydra_are_left_to_hydra():
    assert check_command_line("config", ["--help"]) is None
    assert check_command_line("config", ["--info", "defaults"]) is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["diagnostics=null"], "diagnostics must be one of default, light, none, got null"),
        (["logger=null"], "logger must be one of csv,"),
        (["diagnostics=nnone"], "diagnostics must be one of default, light, none, got nnone"),
        (["diagnostics.gradent=null"], "unknown key 'diagnostics.gradent': did you mean 'diagnostics.gradi"),
        (["diagnostic=none"], "unknown key 'diagnostic': did you mean 'diagnostics'?"),
        (["logger.projct=x"], "unknown key 'logger.projct': did you mean 'logger.project' of logger=wandb?"),
        (["logger.project=x"], "unknown key 'logger.project': logger=wandb has it"),
        (["task.defaults=x"], "unknown key 'task.defaults': task has the keys max_operand, n_terms"),
        (["logger=wandb", "logger.projct=x"], "unknown key 'logger.projct': did you mean 'logger.project'?"),
        (["zzz=1"], "unknown key 'zzz': --help-all lists all"),
        (
            ["seed=1,2"],
            """seed=1,2: quote it if it is one value, "seed='1,2'", or give a list, seed=[1,2]; sev""",
        ),
        (
            ["resume=runs/lr=1e-3"],
            """resume=runs/lr=1e-3: the value cannot be read as it stands; quote it: "resume='runs/lr""",
        ),
        (
            ["model.path=josé", "seed=1"],
            """model.path=josé: the value cannot be read as it stands; quote it: "model.path='josé'\"""",
        ),
        (
            ["resume=it's"],
            "resume=it's: the value cannot be read as it stands; quote it: \"resume='it\\'s'\"",
        ),
        (
            ["hydra.run.dir=~/x"],
            "hydra.run.dir=~/x: the value cannot be read as it stands; quote it: \"hydra.run.dir='/",
        ),
    ],
)
def test_errors_of_hydra_are_one_line(overrides, says):
    with pytest.raises(ConfigError) as caught:
        check_command_line("config", overrides)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    check_command_line("config", ["logger=wandb", "logger.project=x", "diagnostics.gradient=null"])


@pytest.mark.parametrize("override", ["resume='runs/lr=1e-3'", "model.path='josé'", "resume='it\\'s'"])
def test_advised_overrides_are_accepted(override):
    assert check_command_line("config", [override]) is not None
