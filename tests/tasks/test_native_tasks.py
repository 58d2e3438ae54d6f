"""Properties of every native task."""

import random

import pytest

from lit_rlkv.data.tokenizers import build_task_tokenizer, encode
from lit_rlkv.tasks import ChainSum, Countdown, FiniteTask, Recall, Sorting, Task

TASKS = [
    ChainSum(),
    ChainSum(n_terms=2, max_operand=1),
    Recall(),
    Recall(n_pairs=1, n_queries=1),
    Recall(n_pairs=60, n_queries=5, value_digits=3),
    Sorting(),
    Sorting(n_items=2, max_value=1),
    Sorting(n_items=12, max_value=99),
    Countdown(),
    Countdown(n_numbers=2, max_number=1, max_target=2),
    Countdown(n_numbers=5, max_number=50, max_target=100),
]
every_task = pytest.mark.parametrize("task", TASKS, ids=repr)


def problems(task, n=100):
    return [task.sample(random.Random(seed)) for seed in range(n)]


@every_task
def test_the_worked_solution_scores_one(task):
    assert all(task.score(problem, problem.solution) == 1.0 for problem in problems(task))


@every_task
def test_a_corruption_scores_zero(task):
    for seed, problem in enumerate(problems(task)):
        for repeat in range(5):
            rejected = task.corrupt(problem, random.Random(1000 * seed + repeat))
            assert task.score(problem, rejected) == 0.0, (problem, rejected)


@every_task
def test_text_around_the_solution_scores_zero(task):
    for problem in problems(task, 20):
        for wrapped in (
            "",
            problem.solution + "\n",
            " " + problem.solution,
            problem.solution + "0",
            "(" + problem.solution,
        ):
            assert task.score(problem, wrapped) == 0.0, wrapped


@every_task
def test_repeating_the_prompt_is_not_an_answer(task):
    assert all(task.score(problem, problem.prompt) == 0.0 for problem in problems(task))


@every_task
def test_a_problem_is_a_function_of_the_generator_alone(task):
    random.seed(1)
    first = problems(task)
    random.seed(2)
    assert problems(task) == first


@every_task
def test_the_task_tokenizer_encodes_every_text_of_a_task(task):
    tokenizer = build_task_tokenizer()
    for problem in problems(task):
        for text in (problem.prompt, problem.solution, task.corrupt(problem, random.Random(0))):
            input_ids = encode(tokenizer, text)
            assert len(input_ids) == len(text)
            assert tokenizer.decode(input_ids) == text


@every_task
def test_a_native_task_is_an_endless_one(task):
    assert isinstance(task, Task)
    assert not isinstance(task, FiniteTask)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (ChainSum(n_terms=3), ChainSum(n_terms=30)),
        (Recall(n_pairs=3, n_queries=2), Recall(n_pairs=30, n_queries=2)),
        (Sorting(n_items=3), Sorting(n_items=30)),
        (Countdown(n_numbers=2), Countdown(n_numbers=6)),
    ],
    ids=lambda task: repr(task),
)
def test_the_length_knob_lengthens_every_prompt(short, long):
    assert max(len(p.prompt) for p in problems(short, 30)) < min(len(p.prompt) for p in problems(long, 30))


@pytest.mark.parametrize(
    ("task", "options", "named"),
    [
        (ChainSum, {"n_terms": 1}, "n_terms must be a whole number of at least 2 and at most 10000, got 1"),
        (ChainSum, {"max_operand": 0}, "max_operand"),
        (ChainSum, {"slips": [0, 1]}, "slips"),
        (ChainSum, {"slips": [-1, -2]}, "slips"),
        (ChainSum, {"slips": []}, "slips"),
        (Recall, {"n_pairs": 2, "n_queries": 3}, "n_queries must be at most n_pairs=2"),
        (Recall, {"n_queries": 0}, "n_queries"),
        (Recall, {"value_digits": 0}, "value_digits"),
        (Sorting, {"n_items": 1}, "n_items"),
        (Sorting, {"max_value": 0}, "max_value"),
        (Countdown, {"n_numbers": 1}, "n_numbers"),
        (Countdown, {"max_number": 0}, "max_number"),
        (Countdown, {"max_number": 50, "max_target": 99}, "max_target must be at least .* 100, .* got 99"),
    ],
)
def test_a_setting_without_problems_is_refused(task, options, named):
    with pytest.raises(ValueError, match=named):
        task(**options)
