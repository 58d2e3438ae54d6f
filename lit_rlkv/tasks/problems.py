"""Problems as a task: rows of a user's data with a prompt, mostly an answer, perhaps a worked solution."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_rlkv.checks import is_finite
from lit_rlkv.rewards.verifier import final_answer
from lit_rlkv.tasks.base import change_one_character, corrupt_final_answer, solve_with
from lit_rlkv.tasks.chat import answerable, text_or_chat, with_system
from lit_rlkv.tasks.listed import ListedTask
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import Problem


class Problems(ListedTask[Problem]):
    """Problems whose own score compares final answers as texts.

    Where `is_verifiable` is false it says nothing, and rewards come from functions or from a reward model.
    """

    def __init__(
        self,
        table: Table[Problem],
        held_out: Table[Problem] | None = None,
        *,
        answer_after: str | None,
        is_verifiable: bool = True,
    ) -> None:
        super().__init__(table, held_out)
        self.answer_after = answer_after
        self.is_verifiable = is_verifiable

    def at(self, index: int) -> Problem:
        return self._table.rows[index]

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the final answer equals the row's, both stripped of surrounding whitespace."""
        return float(bool(problem.answer) and final_answer(completion, self.answer_after) == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The solution with one character of its answer changed, or of anything where it does not hold it.

        Raises:
            ValueError: the problem has no solution.
        """
        if not problem.solution:
            raise ValueError(
                f"{self} has prompts alone, so there is no solution to corrupt; leave sft out of stages"
            )
        if problem.answer and problem.answer in problem.solution:
            return corrupt_final_answer(problem, rng)
        return change_one_character(problem.solution, rng)


@dataclass(frozen=True)
class RowFormat:
    """How rows become problems."""

    answer_after: str | None = None
    """The marker that ends the reasoning ("####" in GSM8K)."""
    system_prompt: str | None = None
    checks_solution: bool = True
    """True if a solution must score 1.0 by the task's own verifier."""
    extra: tuple[str, ...] = ()
    """Keys that reward functions get beside the answer."""
    required: tuple[str, ...] = ("prompt",)
    """Keys that no row may lack."""

    def __call__(self, entry: Mapping[str, Any]) -> Problem:
        """A problem from `prompt` (a text or chat messages), and perhaps `answer` and `solution`.

        Raises:
            ValueError: a key that lacks or holds something else, or a solution that would not score.
        """
        missing = [key for key in self.required if key not in entry]
        if missing:
            raise ValueError(f"missing {', '.join(missing)}; each line needs {' and '.join(self.required)}")
        prompt = with_system(answerable(text_or_chat(entry["prompt"], "prompt")), self.system_prompt)
        extra = {key: _plain(entry[key], key) for key in self.extra}
        if "answer" not in entry and "solution" not in entry:
            return Problem(prompt, "", "", extra)
        solution = None if "solution" not in entry else _text(entry["solution"], "solution").rstrip()
        if "answer" in entry:
            answer = _text(entry["answer"], "answer").strip()
        else:
            assert solution is not None
            answer = self._stated(solution)
        if solution is None:
            solution = solve_with(answer, self.answer_after)
        self._check(solution, answer)
        return Problem(prompt, solution, answer, extra)

    def _stated(self, solution: str) -> str:
        answer = final_answer(solution, self.answer_after)
        if answer is None:
            raise ValueError(
                f"the solution {solution!r} has no {self.answer_after!r}, so it states no answer; add it, or "
                "set answer_after"
            )
        return answer

    def _check(self, solution: str, answer: str) -> None:
        if not answer:
            raise ValueError("the answer is empty; drop the row or mend it")
        if self.checks_solution and final_answer(solution, self.answer_after) != answer:
            marker = self.answer_after
            expected = "be the answer" if marker is None else f"end in {marker!r} and the answer"
            raise ValueError(f"the solution {solution!r} must {expected} {answer!r}, or it would score 0")


def _text(value: Any, key: str) -> str:
    """A text, or a number as JSON writes it, a whole one without decimals."""
    if not isinstance(value, str) and not is_finite(value):
        raise ValueError(f"{key} must be text; it is {value!r}: put it in quotes, or drop the row")
    # Columns of integers become floats where a row lacks one, and 72.0 is no text that a model writes.
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _plain(value: Any, key: str) -> Any:
    """Return the value if JSON can hold it, because reward functions may run in another process."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key} cannot be written as JSON ({error}), so no reward function could get it; leave it out of "
            "extra_columns"
        ) from error
    return value
