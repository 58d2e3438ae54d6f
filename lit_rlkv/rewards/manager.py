"""RewardManager: ask all reward functions of a run at once and collect their scores later."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import finalize

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.rewards.functions.base import RewardFunction
from lit_rlkv.rewards.graders import MAX_ERROR_LENGTH, Grader, question_of
from lit_rlkv.rewards.verifier import check_lengths
from lit_rlkv.types import Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answers:
    """Scores of a batch of completions by all functions."""

    scores: dict[str, Float[Tensor, " batch"]]
    """Scores by function name; NaN where a function failed."""
    errors: dict[str, str]
    """The first error of each function that failed."""


class PendingRewards:
    """Questions that graders are answering."""

    def __init__(self, futures: "dict[str, list[Future[float]]]", warned: set[str]) -> None:
        self._futures = futures
        self._warned = warned

    def __len__(self) -> int:
        return sum(len(futures) for futures in self._futures.values())

    def collect(
        self, *, warns: bool = True, on_progress: Callable[[int], object] = lambda n_answers: None
    ) -> Answers:
        """Wait for all answers; the order in which they come does not matter. Warn once per function.

        Args:
            on_progress: called with the number of further answers.
        """
        scores, errors = {}, {}
        for name, futures in self._futures.items():
            answers = _results(futures, on_progress)
            failures = [answer for answer in answers if isinstance(answer, str)]
            if failures:
                errors[name] = failures[0]
            scores[name] = torch.tensor(
                [float("nan") if isinstance(answer, str) else answer for answer in answers]
            )
        if warns:
            for name in [name for name in errors if name not in self._warned]:
                log.warning(
                    "reward.functions.%s failed: %s; responses without a score are left out and counted in "
                    "reward/failed_fraction; this warning is shown once",
                    name,
                    errors[name],
                )
            self._warned.update(errors)
        return Answers(scores, errors)


class RewardManager:
    """The reward functions of a run; their threads and processes start with the first question.

    The end of a `with` block ends them. The end of this process ends worker processes and programs in any
    case.
    """

    def __init__(self, functions: Mapping[str, RewardFunction]) -> None:
        self.functions = dict(functions)
        self._graders: dict[str, Grader] = {}
        finalize(self, _close, self._graders)
        self._warned: set[str] = set()

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and processes; the next question starts new ones."""
        _close(self._graders)

    def ask(
        self, problems: Sequence[Problem], completions: Sequence[str], names: Sequence[str] | None = None
    ) -> PendingRewards:
        """Send every completion to the functions with these names (all if None) without waiting."""
        check_lengths(problems, completions)
        questions = [question_of(*pair) for pair in zip(problems, completions, strict=True)]
        futures = {}
        for name in self.functions if names is None else names:
            if name not in self._graders:
                self._graders[name] = self.functions[name].open()
            futures[name] = [self._graders[name].submit(question) for question in questions]
        return PendingRewards(futures, self._warned)


def _close(graders: dict[str, Grader]) -> None:
    while graders:
        graders.popitem()[1].close()


def _results(futures: "Sequence[Future[float]]", on_progress: Callable[[int], object]) -> list[float | str]:
    """Return scores and error messages; an interrupt cancels the other questions."""
    results = []
    try:
        for future in futures:
            results.append(_result(future))
            on_progress(1)
        return results
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _result(future: "Future[float]") -> float | str:
    try:
        return future.result()
    except Exception as error:
        # The message may repeat a model's text: without control characters, no terminal obeys it.
        text = str(error)[:MAX_ERROR_LENGTH]
        return "".join(char if char.isprintable() else " " for char in text) or type(error).__name__
