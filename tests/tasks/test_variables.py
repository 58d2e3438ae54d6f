"""Variable tracking by hand."""

import random

import pytest

from lit_rlkv.tasks import Variables
from lit_rlkv.types import Problem

PROBLEM = Problem("a=3;x=5;b=a;c=b+2;y=x+1;c?", "a=3;b=3;c=5", "c=5")


def evaluate(prompt):
    """The values after running the prompt's assignments in order; a variable must exist before it is read."""
    values = {}
    for statement in prompt.split(";")[:-1]:
        variable, _, expression = statement.partition("=")
        values[variable] = sum(
            int(term) if term.isdigit() else values[term] for term in expression.split("+")
        )
    return values


def test_the_oracle_agrees_with_hand_arithmetic():
    assert evaluate(PROBLEM.prompt) == {"a": 3, "x": 5, "b": 3, "c": 5, "y": 6}


@pytest.mark.parametrize(
    "task", [Variables(), Variables(n_steps=12, n_chains=4), Variables(n_steps=1, n_chains=6)]
)
def test_the_solution_walks_the_chain_that_is_asked_about(task):
    for seed in range(50):
        problem = task.sample(random.Random(seed))
        values = evaluate(problem.prompt)
        assert len(values) == task.n_steps * task.n_chains
        walk = dict(assignment.split("=") for assignment in problem.solution.split(";"))
        assert len(walk) == task.n_steps
        assert {variable: int(value) for variable, value in walk.items()}.items() <= values.items()
        asked = problem.prompt.rpartition(";")[2].removesuffix("?")
        assert problem.answer == f"{asked}={values[asked]}"


def test_chains_are_interleaved():
    prompts = [Variables(n_steps=4, n_chains=2).sample(random.Random(seed)).prompt for seed in range(20)]
    starts = [
        [i for i, statement in enumerate(p.split(";")[:-1]) if statement.partition("=")[2].isdigit()]
        for p in prompts
    ]
    assert any(second not in (1, 4) for _, second in starts)


@pytest.mark.parametrize("completion", ["a=3;b=3;c=5", "c=5"])
def test_only_the_last_assignment_counts(completion):
    assert Variables().score(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion", ["5", "a=3;b=3;x=5", "c=5;c=6", "c=5;", "c=05", "c=15", "a=3 b=3;c=5", "c=b+2;c=5"]
)
def test_anything_but_assignments_ending_in_the_right_one_scores_zero(completion):
    assert Variables().score(PROBLEM, completion) == 0.0
