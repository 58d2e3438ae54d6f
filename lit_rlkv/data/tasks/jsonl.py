"""Problems from a file: one JSON object per line with a prompt, an answer and perhaps a worked solution."""

import random
from functools import partial
from pathlib import Path

from lit_rlkv.data.tasks.base import corrupt_final_answer, final_answer, solve_with
from lit_rlkv.data.tasks.lines import numbered_lines, parse_object, parse_rows
from lit_rlkv.types import Problem

_REQUIRED = ("prompt", "answer")
_OPTIONAL = ("solution",)


class JsonlTask:
    """A finite task whose lines look like `{"prompt": "2+2=", "answer": "4"}`; other keys are ignored.

    `answer_after` is the marker that ends the reasoning ("####" in GSM8K): what follows its last occurrence
    is the final answer, and a completion without it scores 0.0. By default it is the whole completion.
    """

    is_verifiable = True

    def __init__(self, path: str | Path, *, answer_after: str | None = None) -> None:
        self.path = Path(path)
        self.answer_after = answer_after
        self._problems = parse_rows(numbered_lines(self.path), partial(_parse, answer_after=answer_after))

    def __repr__(self) -> str:
        return f"JsonlTask({str(self.path)!r})"

    def __len__(self) -> int:
        return len(self._problems)

    def at(self, index: int) -> Problem:
        """The problem of a line, counted from 0 without blank lines."""
        return self._problems[index]

    def sample(self, rng: random.Random) -> Problem:
        """Any line."""
        return rng.choice(self._problems)

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the final answer equals the file's, both stripped of surrounding whitespace."""
        return float(final_answer(completion, self.answer_after) == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The solution with one character of its final answer changed."""
        return corrupt_final_answer(problem, rng)


def _parse(line: str, answer_after: str | None) -> Problem:
    entry = parse_object(line)
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}; each line needs {' and '.join(_REQUIRED)}")
    wrong = [key for key in (*_REQUIRED, *_OPTIONAL) if not isinstance(entry.get(key, ""), str)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be text; put it in quotes")
    answer = entry["answer"].strip()
    solution = entry.get("solution", solve_with(answer, answer_after)).rstrip()
    if not answer or final_answer(solution, answer_after) != answer:
        expected = "be the answer" if answer_after is None else f"end in {answer_after!r} and the answer"
        raise ValueError(f"the solution {solution!r} must {expected} {answer!r}, or it would score 0")
    return Problem(entry["prompt"], solution, answer)
