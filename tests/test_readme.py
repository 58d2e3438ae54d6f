"""The commands that README shows are the commands that work."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, check_command_line, check_keys
from lit_rlkv.runs.preflight import checked_config
from tests.saved_models import save_checkpoint

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line.split(" #")[0])
    for line in re.findall(
        r"^(?:(?:python|torchrun .*) -m lit_rlkv\.fit|sbatch .*scripts/fit\.sbatch \S+)(.*)$",
        README.replace("\\\n", ""),
        re.M,
    )
]


FILES = {"pairs.jsonl": "preferences.jsonl", "problems.jsonl": "problems.jsonl", "rewards.py:": "rewards.py:"}
"""Placeholders of a user's files, and their stand-ins in tests/data."""


def here(argument):
    for name, file in FILES.items():
        argument = argument.replace(f"={name}", f"=tests/data/{file}")
    return argument


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_for_fit_composes_and_passes_the_checks(arguments):
    overrides = [here(argument) for argument in arguments if not argument.startswith(("--", "resume="))]
    if "task=gsm8k" in arguments:
        overrides += ["task.dataset=tests/data/gsm8k", "task.name=null"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        full = compose("config", overrides=overrides, return_hydra_config=True)
        cfg = compose("config", overrides=overrides)
        check_keys(cfg, full.hydra.runtime.choices, overrides)
        checked_config(cfg)


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 8


def test_files_that_readme_names_exist():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path


PROGRAMS = [
    (program, shlex.split(line.split(" #")[0]))
    for program, line in re.findall(r"^python -m lit_rlkv\.(evaluate|export)(.*)$", README, re.M)
]


@pytest.mark.parametrize(("program", "arguments"), PROGRAMS, ids=str)
def test_every_command_for_a_saved_run_composes(program, arguments):
    assert check_command_line(program, arguments).ckpt == "runs/..."


def test_every_benchmark_takes_what_it_is_given():
    commands = re.findall(r"python (benchmarks/\w+\.py)([^`#\n]*)", README)
    assert len(commands) >= 10
    for path, arguments in commands:
        source = (ROOT / path).read_text()
        assert [one for one in re.findall(r"--[\w-]+", arguments) if f'"{one}"' not in source] == [], path


def test_scripts_that_commands_name_exist():
    named = re.findall(r"^(?:fabric run|sbatch) .*?(scripts/\S+)", README, re.M)
    assert {*named} == {"scripts/fit.py", "scripts/fit.sbatch"}
    assert all((ROOT / path).is_file() for path in named)


def test_the_lines_for_a_trainer_of_ones_own_run_as_they_stand(tmp_path):
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.S)
    names = {"path": save_checkpoint(tmp_path / "model")}
    exec(code.replace("max_new_tokens=2048", "max_new_tokens=16"), names)
    rollout = names["rollout"]
    assert len(rollout.input_ids) == 16
    torch.testing.assert_close(names["logps"].detach(), rollout.rollout_logps, atol=1e-4, rtol=0)
    assert names["logps"].requires_grad
