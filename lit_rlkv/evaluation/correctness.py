"""What is right in an evaluation: as the task says, or a reward function."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.rewards import RewardManager, score
from lit_rlkv.tasks import Task
from lit_rlkv.types import Problem

Accuracy = Callable[[Sequence[Problem], Sequence[str]], Float[Tensor, " batch"]]
"""Of each completion 1.0 if it is right, or its share where a function knows of degrees; NaN if it failed."""


def accuracy_of(task: Task, rewards: RewardManager | None = None, function: str | None = None) -> Accuracy:
    """The task's own score, or that of a function."""

    def own(problems: Sequence[Problem], completions: Sequence[str]) -> Float[Tensor, " batch"]:
        return score(task.score, problems, completions).total

    def asked(problems: Sequence[Problem], completions: Sequence[str]) -> Float[Tensor, " batch"]:
        assert rewards is not None
        assert function is not None
        return rewards.ask(problems, completions, [function]).collect().scores[function]

    return own if function is None else asked
