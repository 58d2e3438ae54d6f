"""All reward functions of a run: asked together, collected when there is nothing else left to do."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from weakref import finalize

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.rewards.functions import RewardFunction
from lit_rlkv.rewards.graders import Grader, question_of
from lit_rlkv.rewards.verifier import check_lengths
from lit_rlkv.types import Problem

log = logging.getLogger(__name__)
MAX_SAID = 300
"""Characters of an error that are kept."""


@dataclass(frozen=True)
class Answers:
    """Scores of a batch of completions by all functions."""

    scores: dict[str, Float[Tensor, " batch"]]
    """By function; NaN where it failed."""
    errors: dict[str, str]
    """By function that failed anywhere: what the first failure said."""


class PendingRewards:
    """Questions under way."""

    def __init__(self, futures: "dict[str, list[Future[float]]]", warned: set[str]) -> None:
        self._futures = futures
        self._warned = warned

    def collect(self, *, warns: bool = True) -> Answers:
        """Wait for all answers; their order in time has no influence. The first failure is a warning."""
        scores, errors = {}, {}
        for name, futures in self._futures.items():
            answers = _answers(futures)
            failures = [answer for answer in answers if isinstance(answer, str)]
            if failures:
                errors[name] = failures[0]
            scores[name] = torch.tensor(
                [float("nan") if isinstance(answer, str) else answer for answer in answers]
            )
        if warns:
            self._warn(errors)
        return Answers(scores, errors)

    def _warn(self, errors: Mapping[str, str]) -> None:
        for name, error in errors.items():
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "reward.functions.%s failed: %s; such responses are left out and counted in "
                    "reward/failed_fraction, and this is said once",
                    name,
                    error,
                )


class RewardManager:
    """The reward functions of a run with their threads and processes, which start when they are first asked.

    A `with` block ends them; the processes, those of programs too, end with this one in any case.
    """

    def __init__(self, functions: Mapping[str, RewardFunction]) -> None:
        self.functions = dict(functions)
        self._graders: dict[str, Grader] = {}
        finalize(self, _close, self._graders)
        self._warned: set[str] = set()

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and processes; asked again, they start anew."""
        _close(self._graders)

    def ask(
        self, problems: Sequence[Problem], completions: Sequence[str], names: Sequence[str] | None = None
    ) -> PendingRewards:
        """Send every completion to the functions, or to those named, and do not wait.

        Raises:
            ValueError: not one problem for each completion.
        """
        check_lengths(problems, completions)
        questions = [question_of(*both) for both in zip(problems, completions, strict=True)]
        graders = {name: self._grader(name) for name in (self.functions if names is None else names)}
        return PendingRewards(
            {name: [grader.submit(question) for question in questions] for name, grader in graders.items()},
            self._warned,
        )

    def _grader(self, name: str) -> Grader:
        if name not in self._graders:
            self._graders[name] = self.functions[name].open()
        return self._graders[name]


def _close(graders: dict[str, Grader]) -> None:
    while graders:
        graders.popitem()[1].close()


def _answers(futures: "Sequence[Future[float]]") -> list[float | str]:
    """Scores and errors; whoever is interrupted meanwhile leaves no questions that nobody waits for."""
    try:
        return [_answer(future) for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _answer(future: "Future[float]") -> float | str:
    """The score, or what went wrong."""
    try:
        return future.result()
    except Exception as error:
        return _printable(str(error)) or type(error).__name__


def _printable(text: str) -> str:
    """The beginning of a message, which may repeat what a model wrote: no terminal obeys it."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_SAID])
