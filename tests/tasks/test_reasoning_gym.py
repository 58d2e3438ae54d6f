"""The adapter to the optional package reasoning-gym."""

import random
import sys

import pytest

from lit_rlkv.tasks import FiniteTask, ReasoningGym, Task


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[gym\]"'):
        ReasoningGym("chain_sum")


def test_problems_come_from_the_dataset_with_its_options():
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert isinstance(task, Task)
    assert not isinstance(task, FiniteTask)
    problem = task.sample(random.Random(0))
    left, sign, right = problem.prompt.rpartition(":")[2].removesuffix("=").split()
    assert int(problem.answer) == int(left) + {"+": 1, "-": -1}[sign] * int(right)
    assert task.sample(random.Random(0)) == problem
    assert len({task.sample(random.Random(seed)).prompt for seed in range(30)}) > 5


@pytest.mark.parametrize("answer_after", [None, "####"])
def test_only_the_exact_final_answer_scores(answer_after):
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("leg_counting", answer_after=answer_after)
    for seed in range(20):
        problem = task.sample(random.Random(seed))
        assert task.score(problem, problem.solution) == 1.0
        assert task.score(problem, f" {problem.solution}\n") == 1.0
        assert task.score(problem, f"{problem.solution} legs") == 0.0
        assert task.score(problem, f"{problem.solution} {problem.answer}") == 0.0
        assert task.score(problem, task.corrupt(problem, random.Random(seed))) == 0.0


def test_an_unknown_dataset_is_refused_when_the_task_is_built():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="no_such_dataset"):
        ReasoningGym("no_such_dataset")
