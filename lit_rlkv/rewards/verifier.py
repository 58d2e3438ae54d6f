"""Rewards of a task's own verifier, and the final answer that verifiers compare."""

from collections.abc import Callable, Sequence

import torch

from lit_rlkv.types import Problem, Rewards

Verifier = Callable[[Problem, str], float]

EXACT_MATCH = "exact_match"
"""Component of the reward that holds the score of the task's verifier."""


def final_answer(completion: str, answer_after: str | None) -> str | None:
    """Return the text after the last marker, stripped; the whole completion if the marker is None.

    None if the marker is missing from the completion.
    """
    if answer_after is None:
        return completion.strip()
    _, marker, answer = completion.rpartition(answer_after)
    return answer.strip() if marker else None


def score(verifier: Verifier, problems: Sequence[Problem], completions: Sequence[str]) -> Rewards:
    """Score each completion against its own problem."""
    check_lengths(problems, completions)
    total = torch.tensor([verifier(p, c) for p, c in zip(problems, completions, strict=True)])
    return Rewards(total=total, components={EXACT_MATCH: total})


def check_lengths(problems: Sequence[Problem], completions: Sequence[str]) -> None:
    """Raise a ValueError unless there is one problem for each completion."""
    if len(problems) != len(completions):
        raise ValueError(
            f"problems and completions must be equally many, got {len(problems)} and {len(completions)}; "
            "give one problem for each completion"
        )
