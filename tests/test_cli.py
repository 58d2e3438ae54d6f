import sys
from pathlib import Path

import pytest

from lit_rlkv.cli import compose_arguments, exit_in_one_line, run_command
from lit_rlkv.config import ConfigError, check_keys, parse
from lit_rlkv.config.commands import EvaluateConfig
from lit_rlkv.config.composing import groups, options_of

RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


@pytest.mark.parametrize(
    ("environment", "is_announced"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_the_first_process_alone_announces_slow_imports(monkeypatch, capsys, environment, is_announced):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run_command(lambda arguments: arguments, ["json"], lambda asked: None)
    assert capsys.readouterr().err == "loading torch and transformers\n" * is_announced


@pytest.mark.parametrize(
    ("code", "ends"), [(None, "error: .*sys.exit"), (0, "error: .*sys.exit"), (3, "^3$")]
)
def test_an_exit_of_called_code_never_passes_for_success(monkeypatch, code, ends):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match=ends):
        run_command(lambda arguments: arguments, ["json"], lambda asked: sys.exit(code))


def test_a_name_that_is_too_long_for_a_file_is_one_line():
    says = r"error: the name x+\.\.\. is too long for a file"
    with pytest.raises(SystemExit, match=says), exit_in_one_line():
        Path("x" * 300).exists()
    with pytest.raises(FileNotFoundError), exit_in_one_line():
        Path("nothing/there").stat()


def test_an_error_that_repeats_a_long_value_keeps_its_beginning_and_its_end():
    with pytest.raises(SystemExit) as ended, exit_in_one_line():
        raise ConfigError(f"a={'x' * 10_000} is wrong; give another")
    said = str(ended.value)
    assert said.startswith("error: a=xxx")
    assert said.endswith("x is wrong; give another")
    assert len(said) < 3100


def printed(capsys, monkeypatch, name, *arguments):
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        compose_arguments(name, arguments)
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("program", ["config", "evaluate", "export"])
def test_the_help_fits_a_screen_and_begins_with_examples(capsys, monkeypatch, program):
    lines = printed(capsys, monkeypatch, program, "--help").splitlines()
    assert len(lines) < 50
    assert lines[2] == "Examples"


def test_the_help_of_fit_names_every_option(capsys, monkeypatch):
    words = printed(capsys, monkeypatch, "config", "-h").replace(",", " ").split()
    assert [option for group in groups() for option in options_of(group) if option not in words] == []


def test_the_config_is_shown_by_hydra(capsys, monkeypatch):
    assert "\nseed: 3\n" in "\n" + printed(capsys, monkeypatch, "config", "seed=3", "--cfg", "job")


def test_the_config_is_shown_with_keys_that_the_user_names_as_it_is_run_with_them(capsys, monkeypatch):
    for options in ("cache.policy_options.seed=7", "cache.policy_options={seed: 7}"):
        given = [options, "reward.functions.mine._target_=a.B", "--cfg", "job"]
        said = printed(capsys, monkeypatch, "config", *given)
        assert "  policy_options:\n    seed: 7\n" in said
    assert "    mine:\n      _target_: a.B\n" in said


def test_options_of_the_users_own_are_found_below_config_dir(tmp_path):
    """As a recipe and as a task, whose keys are then known, in a folder whose name needs quotes."""
    folder = tmp_path / "it's mine"
    for group, text in {
        "recipe": "# @package _global_\nseed: 9",
        "task": "n_terms: 2",
    }.items():
        (folder / group).mkdir(parents=True)
        (folder / group / "mine.yaml").write_text(text)
    for given in (["--config-dir", str(folder)], [f"--config-dir={folder}"]):
        cfg, hydra_cfg = compose_arguments("config", [*given, "recipe=mine", "task=mine"])
        assert (cfg.seed, cfg.task.n_terms) == (9, 2)
        check_keys(cfg, hydra_cfg.runtime.choices, list(hydra_cfg.overrides.task))
    with pytest.raises(ConfigError, match="recipe must be one of"):
        compose_arguments("config", ["recipe=mine"])


@pytest.mark.parametrize("given", [["--config-dir", "nowhere"], ["--config-dir"]])
def test_a_config_dir_that_is_none_is_refused(given):
    with pytest.raises(ConfigError, match=r"--config-dir.*give one that has GROUP/NAME.yaml"):
        compose_arguments("config", given)


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("config", ["--seed", "3"], "'--seed' sets nothing; write key=value, such as seed=3"),
        ("config", ["seed", "3"], "'seed' sets nothing"),
        ("config", ["help"], "'help' sets nothing"),
        ("config", ["-m", "seed=1,2"], "lit_rlkv.sweep FILE"),
        ("evaluate", ["runs/x"], "such as ckpt=runs/NAME"),
        ("export", ["--ckpt=runs/x"], "such as ckpt=runs/NAME"),
    ],
)
def test_a_command_line_in_another_form_is_refused(program, arguments, says):
    with pytest.raises(ConfigError) as caught:
        compose_arguments(program, arguments)
    assert says in str(caught.value)


def test_an_unknown_key_of_another_program_is_refused_with_those_that_it_takes():
    with pytest.raises(ConfigError, match=r"unknown key 'budget'; it takes ckpt, budgets, "):
        parse(EvaluateConfig, compose_arguments("evaluate", ["ckpt=runs/x", "budget=3"])[0])
