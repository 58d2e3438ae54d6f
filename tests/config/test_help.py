"""The texts of --help, --help KEY and --help-all."""

import subprocess
import sys
from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.config.composing import SCHEMAS, groups, options_of
from lit_rlkv.config.help import asked_help
from tests.config.test_schema import all_keys

ROOT = Path(__file__).parents[2]
PROGRAMS = ("config", "evaluate", "export")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_short_help_fits_a_screen_and_begins_with_examples(program):
    text = asked_help(program, ["-h"])
    lines = text.splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= 110
    assert lines[2:3] == ["Examples"]
    assert "--help-all" in text


def test_the_short_help_of_fit_names_every_group_with_its_options():
    words = asked_help("config", ["--help"]).replace(",", " ").split()
    assert {f"{group}:" for group in groups()} <= {*words}
    assert [option for group in groups() for option in options_of(group) if option not in words] == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_full_help_has_every_key_with_its_meaning(program):
    text = asked_help(program, ["--help-all"])
    assert max(map(len, text.splitlines())) <= 110
    heads = {line.strip().partition("=")[0] for line in text.splitlines()}
    words = " ".join(text.split())
    keys = [*all_keys(SCHEMAS[program])]
    assert [path for path, _, _ in keys if path not in heads] == []
    assert [path for path, declared, _ in keys if " ".join(declared.help.split()) not in words] == []
    assert program != "config" or "a whole number of at least 1: keys that survive a compaction" in words


def test_the_full_help_has_every_option_with_its_keys():
    text = asked_help("config", ["--help-all"])
    assert [
        f"{group}={one}" for group in groups() for one in options_of(group) if f"{group}={one}" not in text
    ] == []
    assert "logger.project = lit_rlkv" in text
    assert "value_clip = 0.2" in text


def test_help_on_a_group_or_key_shows_that_alone():
    text = asked_help("config", ["--help", "cache"])
    assert "  cache.budget\n      a whole number of at least 1: keys that survive a compaction" in text
    assert "rollout." not in text
    assert asked_help("config", ["rollout.n_prompts", "--help"]).splitlines()[0] == "  rollout.n_prompts"
    assert "experiment=tis\n      Compressed rollouts" in asked_help("config", ["--help", "experiment"])
    assert "checkpoints/iteration-N" in asked_help("evaluate", ["--help", "ckpt"])


def test_help_on_what_does_not_exist_names_the_closest():
    with pytest.raises(ConfigError, match=r"no such key or group; did you mean 'cache\.budget'\?"):
        asked_help("config", ["--help", "cache.bugdet"])


def test_help_needs_no_torch():
    script = (
        "import sys\n"
        "from lit_rlkv.cli import compose_arguments\n"
        "from lit_rlkv.sweep import parse\n"
        "for option in ('--help', '--help-all'):\n"
        "    for program in ('config', 'evaluate', 'export'):\n"
        "        try:\n"
        "            compose_arguments(program, [option])\n"
        "        except SystemExit as error:\n"
        "            assert not error.code\n"
        "try:\n"
        "    parse(['--help'])\n"
        "except SystemExit as error:\n"
        "    assert not error.code\n"
        "assert not {'torch', 'transformers', 'lightning'} & {*sys.modules}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Examples\n") == 6
