"""Rewards from exact verifiers."""

from collections.abc import Callable, Sequence

import torch

from lit_rlkv.types import Problem, Rewards

Verifier = Callable[[Problem, str], float]


def score(verifier: Verifier, problems: Sequence[Problem], completions: Sequence[str]) -> Rewards:
    """Each completion scored against its own problem.

    Raises:
        ValueError: not one problem for each completion.
    """
    check_lengths(problems, completions)
    total = torch.tensor([verifier(p, c) for p, c in zip(problems, completions, strict=True)])
    return Rewards(total=total, components={"exact_match": total})


def check_lengths(problems: Sequence[Problem], completions: Sequence[str]) -> None:
    """Refuse completions that would be scored against the problems of others.

    Raises:
        ValueError: not one problem for each completion.
    """
    if len(problems) != len(completions):
        raise ValueError(
            f"{len(problems)} problems for {len(completions)} completions; give one problem for each"
        )
