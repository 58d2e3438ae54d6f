"""Any dataset of the optional package reasoning-gym as a task."""

import importlib
import random
from typing import Any

from lit_rlkv.rewards.verifier import final_answer
from lit_rlkv.tasks.base import corrupt_final_answer, shortest_solution
from lit_rlkv.types import Problem

_N_SEEDS = 2**31


class ReasoningGym:
    """Problems of one reasoning-gym dataset; its options, such as sizes and ranges, are passed on.

    `answer_after` is the marker after which a completion gives its final answer; by default the answer is the
    whole completion. The package's own verifiers are not used, because some give partial credit, which can be
    farmed: choose datasets with one right answer.
    """

    is_verifiable = True

    def __init__(self, dataset: str, *, answer_after: str | None = None, **options: Any) -> None:
        self.dataset = dataset
        self.answer_after = answer_after
        self.options = options
        try:
            self._gym = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ImportError(
                'ReasoningGym needs the package reasoning-gym, which is missing; pip install -e ".[gym]"'
            ) from error
        self._problem(seed=0)

    def __repr__(self) -> str:
        return f"ReasoningGym({self.dataset!r})"

    def sample(self, rng: random.Random) -> Problem:
        """Return a new problem; its worked solution is only the answer."""
        return self._problem(rng.randrange(_N_SEEDS))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the final answer is exactly the dataset's, both stripped of surrounding whitespace."""
        return float(final_answer(completion, self.answer_after) == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return the solution with one character of its final answer changed."""
        return corrupt_final_answer(problem, rng)

    def _problem(self, seed: int) -> Problem:
        entry = self._gym.create_dataset(self.dataset, seed=seed, size=1, **self.options)[0]
        if entry["answer"] is None:
            raise ValueError(f"dataset {self.dataset!r} must have answers to compare with; choose another")
        answer = str(entry["answer"]).strip()
        return Problem(entry["question"], shortest_solution(answer, self.answer_after), answer)
