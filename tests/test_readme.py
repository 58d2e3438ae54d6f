"""The commands that README shows are the commands that work."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, check_config, check_keys

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line.split(" #")[0])
    for line in re.findall(r"^(?:python|torchrun .*) -m lit_rlkv\.fit(.*)$", README.replace("\\\n", ""), re.M)
]


FILES = {"pairs.jsonl": "preferences.jsonl", "problems.jsonl": "problems.jsonl", "rewards.py:": "rewards.py:"}
"""What a user brings, and what stands for it in tests/data."""


def here(argument):
    for name, file in FILES.items():
        argument = argument.replace(f"={name}", f"=tests/data/{file}")
    return argument


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_for_fit_composes_and_passes_the_checks(arguments):
    if "task=reasoning_gym" in arguments:
        pytest.importorskip("reasoning_gym")
    overrides = [here(argument) for argument in arguments if not argument.startswith(("--", "resume="))]
    if "task=gsm8k" in arguments:
        pytest.importorskip("datasets")
        overrides += ["task.dataset=tests/data/gsm8k", "task.name=null"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        full = compose("config", overrides=overrides, return_hydra_config=True)
        cfg = compose("config", overrides=overrides)
        check_keys(cfg, full.hydra.runtime.choices, overrides)
        check_config(cfg)


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 8


def test_files_that_readme_names_exist():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path
