"""Problems as a task: rows of a user's data with a prompt, mostly an answer, perhaps a worked solution."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lit_rlkv.checks import is_finite
from lit_rlkv.rewards.verifier import final_answer
from lit_rlkv.tasks.base import ListedTask, change_one_character, corrupt_final_answer, shortest_solution
from lit_rlkv.tasks.rows import Table, parse_prompt, read_lines, read_rows, require_user_turn, with_system
from lit_rlkv.types import Problem

_HINT = "set prompt_column, answer_column and solution_column, with null for a missing answer or solution"


@dataclass(frozen=True)
class RowFormat:
    """Parses rows into problems."""

    answer_after: str | None = None
    """Marker before the final answer ("####" in GSM8K)."""
    system_prompt: str | None = None
    checks_solution: bool = True
    """True if a solution must score 1.0 by the task's own verifier."""
    extra: tuple[str, ...] = ()
    """Keys that reward functions get beside the answer."""
    required: tuple[str, ...] = ("prompt",)
    """Keys that every row must have."""

    def __call__(self, entry: Mapping[str, Any]) -> Problem:
        """Return a problem from `prompt` (a text or chat messages) and perhaps `answer` and `solution`."""
        missing = [key for key in self.required if key not in entry]
        if missing:
            raise ValueError(f"missing {', '.join(missing)}; each line needs {' and '.join(self.required)}")
        prompt = with_system(require_user_turn(parse_prompt(entry["prompt"], "prompt")), self.system_prompt)
        extra = {key: _json_value(entry[key], key) for key in self.extra}
        if "answer" not in entry and "solution" not in entry:
            return Problem(prompt, "", "", extra)
        marker = self.answer_after
        solution = _text(entry["solution"], "solution").rstrip() if "solution" in entry else None
        if "answer" in entry:
            answer: str | None = _text(entry["answer"], "answer").strip()
        else:
            answer = final_answer(solution or "", marker)
        if answer is None:
            raise ValueError(
                f"the solution {solution!r} must have {marker!r} before an answer; add it or set answer_after"
            )
        if not answer:
            raise ValueError("the answer is empty; drop the row or fix it")
        if solution is None:
            solution = shortest_solution(answer, marker)
        if self.checks_solution and final_answer(solution, marker) != answer:
            expected = "be the answer" if marker is None else f"end in {marker!r} and the answer"
            raise ValueError(f"the solution {solution!r} must {expected} {answer!r}, or it would score 0")
        return Problem(prompt, solution, answer, extra)


class Problems(ListedTask[Problem]):
    """Problems whose own score compares final answers as texts.

    If `is_verifiable` is False, rewards come from reward functions or a reward model instead.
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
        """Return the solution with one character of its answer changed, or any if it lacks the answer."""
        if not problem.solution:
            raise ValueError(f"{self} has prompts but no solutions to corrupt; leave sft out of stages")
        if problem.answer and problem.answer in problem.solution:
            return corrupt_final_answer(problem, rng)
        return change_one_character(problem.solution, rng)


class JsonlTask(Problems):
    """Problems of lines that look like `{"prompt": "2+2=", "answer": "4"}`; other keys are ignored.

    `answer_after` is the marker before the final answer ("####" in GSM8K), of which the last counts. A
    completion without it scores 0.0. With None the answer is the whole completion.
    """

    def __init__(self, path: str | Path, *, answer_after: str | None = None) -> None:
        row_format = RowFormat(answer_after, required=("prompt", "answer"))
        super().__init__(read_lines(path, row_format), answer_after=answer_after)


def load_problems(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    eval_split: str | None = None,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
    solution_column: str | None = None,
    extra_columns: Sequence[str] = (),
    system_prompt: str | None = None,
    answer_after: str | None = None,
) -> Problems:
    """Load all problems of a dataset.

    Args:
        dataset, name, split: as in `lit_rlkv.tasks.rows.read_rows`.
        eval_split: the problems to evaluate on; None holds out about one in ten.
        prompt_column: a text, or chat messages that end in the user's.
        answer_column: texts or numbers; None takes what follows `answer_after` in the solution, or without
            a solution column, prompts alone.
        solution_column: worked solutions for the SFT stage; None shows the answer alone.
        extra_columns: what reward functions get beside prompt, answer and solution.
        system_prompt: a message before every prompt that has none of its own.
        answer_after: the marker before the final answer ("####" in GSM8K), for the task's own score. Without
            it that is the whole completion, and there is no own score if solutions say more than it.
    """
    if answer_column is None and solution_column is not None and answer_after is None:
        raise ValueError(
            f"solution_column={solution_column!r} needs a way to find its answers; set answer_column, or "
            "answer_after to the marker before the answer"
        )
    reserved = {"prompt", "answer", "solution", "completion"}
    taken = [column for column in extra_columns if column in reserved]
    if taken:
        raise ValueError(f"extra_columns must not have the reserved names {', '.join(taken)}; rename them")
    wanted = {"prompt": prompt_column, "answer": answer_column, "solution": solution_column}
    wanted |= {column: column for column in extra_columns}
    columns = tuple((key, column) for key, column in wanted.items() if column is not None)
    has_own_score = answer_after is not None or (answer_column is not None and solution_column is None)
    row_format = RowFormat(answer_after, system_prompt, has_own_score, tuple(extra_columns))
    read = partial(read_rows, dataset, row_format, columns, hint=_HINT, name=name)
    return Problems(
        read(split=split),
        None if eval_split is None else read(split=eval_split),
        answer_after=answer_after,
        is_verifiable=has_own_score,
    )


def _text(value: Any, key: str) -> str:
    """Return a text, or a number as JSON writes it, a whole one without decimals."""
    if not isinstance(value, str) and not is_finite(value):
        raise ValueError(f"{key} must be text, got {value!r}; put it in quotes, or drop the row")
    # Columns of integers become floats if a row lacks one, and no model writes 72.0.
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _json_value(value: Any, key: str) -> Any:
    """Return the value if JSON can hold it, because reward functions may run in another process."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key} must be writable as JSON for reward functions, got {error}; leave it out of extra_columns"
        ) from error
    return value
