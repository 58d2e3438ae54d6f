"""The examples run as their files say, without a network, and show what they promise."""

import csv
import importlib.util
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rlkv.environments import Tools

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUMBER = r"([\d.]+(?:e-\d+)?)"


def run(*arguments, folder=ROOT):
    """Run a command of Python; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_index_names_every_example():
    named = re.findall(r"^- \[\w+\.py\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
def test_the_plain_loop_learns_and_its_ratios_are_one():
    lines = run("examples/plain_pytorch.py").splitlines()
    numbers = [
        re.search(rf"reward {NUMBER}  largest \|ratio - 1\| {NUMBER}", line).groups() for line in lines
    ]
    rewards = [float(reward) for reward, _ in numbers]
    assert rewards[-1] > rewards[0] + 0.1
    assert max(float(gap) for _, gap in numbers) < 1e-4


@pytest.mark.slow
def test_trl_learns_from_replayed_rollouts():
    pytest.importorskip("trl")
    last = run("examples/trl_grpo.py").splitlines()[-1]
    first, final, gap = map(float, re.findall(NUMBER, last))
    assert final > first + 0.05
    assert gap < 1e-4


@pytest.mark.slow
def test_without_replay_the_learner_of_trl_is_off_policy():
    pytest.importorskip("trl")
    last = run("examples/trl_grpo.py", "--steps", "1", "--correction", "naive").splitlines()[-1]
    assert float(re.findall(NUMBER, last)[-1]) > 1e-3


def test_the_reward_prefers_right_answers_and_short_ones():
    spec = importlib.util.spec_from_file_location("own_reward", EXAMPLES / "own_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    right, near, wrong = (module.score(text, "12") for text in ("3,7,12", "12,70", "3,7"))
    assert right > near > wrong
    assert module.score("12", "12") > right


@pytest.mark.slow
def test_the_command_of_the_own_reward_logs_it(tmp_path):
    (command,) = re.findall(
        r"^python (-m lit_rlkv\.fit .*)$", (EXAMPLES / "own_reward.py").read_text(), re.MULTILINE
    )
    run(*shlex.split(command), f"runs_dir={tmp_path}")
    (path,) = tmp_path.glob("*/metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["rewards/custom/std"]) > 0 for row in rows)


def test_the_tool_answers_the_calls_that_the_prompt_shows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    own = importlib.import_module("examples.own_tool")
    problem = own.Multiplication().sample(random.Random(0))
    said = [message for message in problem.prompt if message.role in ("assistant", "tool")]
    environment = Tools([own.multiply])
    for turn, result in zip(said[::3], said[1::3], strict=True):
        assert environment.step(turn.content) == ([result], 0.0, False)
    # The last message asks for the product that is the answer.
    factors = map(int, re.findall(r"\d+", problem.prompt[-1].content))
    assert problem.answer == str(own.multiply(*factors))
    assert own.Multiplication().score(problem, problem.solution) == 1.0
    assert own.Multiplication().score(problem, own.Multiplication().corrupt(problem, random.Random(0))) == 0.0
