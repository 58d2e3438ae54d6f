"""Pairwise judges, which say which of two completions is better, and scores from their verdicts."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.rewards.verifier import Verifier, check_lengths
from lit_rlkv.types import Problem

Judge = Callable[[Problem, str, str], float]
"""Above 0 if the first completion is better, below 0 if the second is, 0 for a tie."""


def right_then_short(problem: Problem, first: str, second: str, *, verifier: Verifier) -> float:
    """Prefer the completion with the higher verifier score; if equal, the one with fewer characters.

    A `Judge` once a task's `score` is bound: `functools.partial(right_then_short, verifier=task.score)`.
    """
    lead = verifier(problem, first) - verifier(problem, second)
    return lead if lead != 0 else float(len(second) - len(first))


def tournament(
    judge: Judge, problems: Sequence[Problem], completions: Sequence[str], group_size: int
) -> Float[Tensor, " batch"]:
    """Return wins minus losses of each completion against all others of its group.

    Every pair is judged once, the earlier completion as the first: a judge with a position bias should
    compare both orders itself.

    Args:
        problems: one for each completion, the same throughout a group.
        completions: the groups one after another.
    """
    check_lengths(problems, completions)
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size}; one completion has no rival")
    if len(completions) % group_size:
        raise ValueError(
            f"the number of completions must be a multiple of group_size={group_size}, got {len(completions)}"
        )
    scores = torch.zeros(len(completions))
    for start in range(0, len(completions), group_size):
        group = range(start, start + group_size)
        if any(problems[index] != problems[start] for index in group):
            raise ValueError(
                f"completions {start} to {group[-1]} must answer the same problem to be compared; give the "
                "groups one after another"
            )
        for first, second in itertools.combinations(group, 2):
            verdict = judge(problems[first], completions[first], completions[second])
            if math.isnan(verdict):
                raise ValueError(
                    f"the judge must return a number, got NaN for completions {first} and {second}; return 0 "
                    "for a tie"
                )
            sign = (verdict > 0) - (verdict < 0)
            scores[first] += sign
            scores[second] -= sign
    return scores
