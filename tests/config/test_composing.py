"""Hydra's errors, and those before torch is imported, in one line each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError, composed
from tests.config.asking import asked, refusal

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("diagnostics=null", "diagnostics must be one of default, light, none, got null"),
        ("algorithm=grop", "algorithm=grpo"),
        ("model=Qwen/Qwen2.5-0.5B", "model.path=Qwen/Qwen2.5-0.5B"),
        ("task=data/mine.jsonl", "task=dataset task.dataset=data/mine.jsonl"),
        ("experiment=tis,mis", "lit_rlkv.sweep"),
        ("seed=1,2", "seed=[1,2]"),
        ("resume=runs/lr=1e-3", "\"resume='runs/lr=1e-3'\""),
        ("model.path=josé", "\"model.path='josé'\""),
        ("resume=it's", "\"resume='it\\'s'\""),
        ("hydra.run.dir=~/x", "\"hydra.run.dir='/"),
        ("rollout.n_splits=${nope}", "rollout.n_splits: "),
        ("seed=${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH_VARIABLE"),
        ("evaluation.budgets=[${eval:1}]", "evaluation.budgets[0]: "),
        ("runs_dir=${runs_dir}", "runs_dir: "),
    ],
)
def test_what_does_not_compose_is_refused_in_one_line(override, says):
    with pytest.raises(ConfigError) as caught:
        composed("config", [override])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["resume='runs/lr=1e-3'", "model.path='josé'", "resume='it\\'s'"])
def test_advised_overrides_are_accepted(override):
    assert composed("config", [override]).hydra.overrides.task == [override]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["task=jsonl"], "task.path=..."),
        (["task=dataset"], "task.dataset=..."),
        (["task=preferences", "reward=learned"], "task.path=..."),
        (["reward=python"], "reward.functions.custom.path=..."),
        (["reward=endpoint"], "reward.functions.custom.url=..."),
        (["task=jsonl", "reward=python"], "reward.functions.custom.path=... task.path=..."),
        (["resume=true"], "resume=runs/NAME"),
        (["resume=''"], "resume=runs/NAME"),
        (["runs_dir=null"], "runs_dir=runs"),
        (["runs_dir='~/runs'"], "runs_dir=~/runs"),
        (["resume='~/runs/x'"], "resume=~/runs/x"),
    ],
)
def test_a_key_that_lacks_its_value_is_asked_for_by_name(overrides, key):
    assert key in refusal(*overrides)


def test_a_resume_by_the_config_passes():
    assert asked("fabric.n_threads=2", "resume=auto").resume == "auto"


SCRIPT = """
import sys
from lit_rlkv.fit import main
for arguments in sys.stdin.read().splitlines():
    sys.argv = ["fit", *arguments.split()]
    try:
        main()
    except SystemExit as error:
        print(error)
assert not {"torch", "transformers", "lightning", "huggingface_hub"} & {*sys.modules}
"""
BEFORE_TORCH = {
    "task=nosuch": "task must be one of",
    "num_generations=4": "algorithm.group_size",
    "--seed 3": "seed=3",
    "experiment tis": "key=value",
    "-m seed=1,2": "lit_rlkv.sweep",
    "optimizer.lr=0": "optimizer.lr",
    "seed=abc": "seed must be a whole number",
    "cache.interval=0": "cache.interval",
}


def answers(command_lines, tmp_path):
    """What fit says to each command line, in a process that must not import torch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(command_lines),
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line.startswith("error: ")]


def test_mistakes_are_told_before_torch_is_imported(tmp_path):
    said = answers(BEFORE_TORCH, tmp_path)
    assert len(said) == len(BEFORE_TORCH)
    assert [line for line, says in zip(said, BEFORE_TORCH.values(), strict=True) if says not in line] == []
