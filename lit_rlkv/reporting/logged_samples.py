"""Sample responses as they stand in samples.jsonl, and the choice of those for the report; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_rlkv.checks import from_json
from lit_rlkv.files import json_lines

MAX_REPORTED = 8
"""Most samples of an iteration in the report."""


@dataclass(frozen=True)
class LoggedSample:
    """One response with its score; `iteration` counts from 1."""

    prompt: str
    completion: str
    reward: float
    iteration: int
    answer: str = ""
    """The task's reference answer; empty if it has none."""
    is_right: bool | None = None
    """True if the task's verifier, or what `reward.accuracy` names, gives full score; None without one."""


def read_samples(path: Path) -> list[LoggedSample]:
    """Return the samples of a file, one for each line; a resumed run removes those that it draws again.

    Raises:
        ValueError: a line is not JSON.
        TypeError: a line is not a sample.
    """
    return [from_json(LoggedSample, row) for row in json_lines(path)]


def select_samples(samples: Sequence[LoggedSample]) -> dict[int, list[LoggedSample]]:
    """Return samples by iteration: of the first, the middle and the last iteration that has any."""
    iterations = sorted({sample.iteration for sample in samples})
    chosen = {iterations[place] for place in (0, len(iterations) // 2, -1)} if iterations else set()
    return {
        iteration: [sample for sample in samples if sample.iteration == iteration][:MAX_REPORTED]
        for iteration in sorted(chosen)
    }
