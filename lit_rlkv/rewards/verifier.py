"""Rewards of a task's own verifier, and the final answer that verifiers compare."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.types import Problem, Rewards

Verifier = Callable[[Problem, str], float]

EXACT_MATCH = "exact_match"
"""Component of the reward that holds the score of the task's verifier."""

MAX_SCORE = 1e6
"""Largest size of a score and of a reward: squares of such numbers and sums of them are finite in float32."""


def final_answer(completion: str, answer_after: str | None) -> str | None:
    """Return the text after the last marker, stripped; the whole completion if the marker is None.

    None if the marker is missing from the completion.
    """
    if answer_after is None:
        return completion.strip()
    _, marker, answer = completion.rpartition(answer_after)
    return answer.strip() if marker else None


def score(verifier: Verifier, problems: Sequence[Problem], completions: Sequence[str]) -> Rewards:
    """Score each completion against its own problem; NaN where the score is no number up to MAX_SCORE."""
    scores = [float(verifier(p, c)) for p, c in zip(problems, completions, strict=True)]
    total = bounded(torch.tensor(scores, dtype=torch.float32))
    return Rewards(total=total, components={EXACT_MATCH: total})


def bounded(scores: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return scores with NaN for those that are infinite or above MAX_SCORE in size."""
    return scores.masked_fill(~(scores.abs() <= MAX_SCORE), float("nan"))
