"""Rewards from pairwise judges, who say which of two completions is better and not how good either is."""

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
    """The verifier's better score wins; among equals the text of fewer characters.

    A `Judge` once a task's `score` is bound: `functools.partial(right_then_short, verifier=task.score)`.
    """
    lead = verifier(problem, first) - verifier(problem, second)
    return lead if lead != 0 else float(len(second) - len(first))


def tournament(
    judge: Judge, problems: Sequence[Problem], completions: Sequence[str], group_size: int
) -> Float[Tensor, " batch"]:
    """Wins minus losses of each completion against all others of its group, from −(group_size − 1) to it.

    Every pair is judged once, the earlier completion as the first: a judge that favours a place should be
    asked both ways inside of `judge`.

    Args:
        problems: one for each completion, the same throughout a group.
        completions: the groups one after another.

    Raises:
        ValueError: lengths that do not make whole groups, groups of several problems, a verdict of NaN.
    """
    _check_groups(problems, completions, group_size)
    scores = torch.zeros(len(completions))
    for start in range(0, len(completions), group_size):
        for first, second in itertools.combinations(range(start, start + group_size), 2):
            verdict = judge(problems[first], completions[first], completions[second])
            if math.isnan(verdict):
                raise ValueError(
                    f"the judge answered NaN to completions {first} and {second}; return 0 for a tie"
                )
            sign = (verdict > 0) - (verdict < 0)
            scores[first] += sign
            scores[second] -= sign
    return scores


def _check_groups(problems: Sequence[Problem], completions: Sequence[str], group_size: int) -> None:
    check_lengths(problems, completions)
    if group_size < 2:
        raise ValueError(f"group_size={group_size} leaves nothing to compare with; give at least 2")
    if len(completions) % group_size:
        raise ValueError(
            f"{len(completions)} completions make no whole groups of {group_size}; give a multiple of it"
        )
    for start in range(0, len(problems), group_size):
        if any(problem != problems[start] for problem in problems[start : start + group_size]):
            raise ValueError(
                f"completions {start} to {start + group_size - 1} answer different problems, so they cannot "
                "be compared; give the groups one after another"
            )
