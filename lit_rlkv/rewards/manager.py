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
from lit_rlkv.rewards.graders import Grader, error_text, question_of
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
    """A batch of completions that graders are scoring; completions may be added one after another.

    Args:
        problems: one for each completion of the batch.
        graders: graders by function name.
        warned: functions whose errors were shown; `collect` adds to it.
    """

    def __init__(self, problems: Sequence[Problem], graders: Mapping[str, Grader], warned: set[str]) -> None:
        self.problems = problems
        self.completions: dict[int, str] = {}
        """The completions added so far by place in the batch."""
        self._graders = graders
        self._futures: dict[str, dict[int, Future[float]]] = {name: {} for name in graders}
        self._warned = warned

    def __len__(self) -> int:
        return sum(len(futures) for futures in self._futures.values())

    def add(self, places: Sequence[int], completions: Sequence[str]) -> None:
        """Send the completions at these places of the batch to all graders without waiting."""
        for place, completion in zip(places, completions, strict=True):
            question = question_of(self.problems[place], completion)
            self.completions[place] = completion
            for name, grader in self._graders.items():
                self._futures[name][place] = grader.submit(question)

    def in_order(self) -> list[str]:
        """Return the completions in the order of the batch."""
        return [self.completions[place] for place in range(len(self.problems))]

    def collect(
        self, *, warns: bool = True, on_progress: Callable[[int], object] = lambda n_answers: None
    ) -> Answers:
        """Wait for all answers, in the order of the batch. Warn once per function.

        The order in which completions were added, or answers come, does not matter.

        Args:
            on_progress: called with the number of further answers.
        """
        assert len(self.completions) == len(self.problems)
        scores, errors = {}, {}
        for name, futures in self._futures.items():
            answers = _results([futures[place] for place in range(len(self.problems))], on_progress)
            failures = [answer for answer in answers if isinstance(answer, str)]
            if failures:
                errors[name] = failures[0]
            scores[name] = torch.tensor(
                [float("nan") if isinstance(answer, str) else float(answer) for answer in answers]
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

    The end of a `with` block ends them. The end of this process ends worker processes in any case.
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

    def begin(self, problems: Sequence[Problem], names: Sequence[str] | None = None) -> PendingRewards:
        """Return a batch without completions for the functions with these names (all if None)."""
        chosen = list(self.functions if names is None else names)
        for name in chosen:
            if name not in self._graders:
                self._graders[name] = self.functions[name].open()
        return PendingRewards(problems, {name: self._graders[name] for name in chosen}, self._warned)

    def ask(
        self, problems: Sequence[Problem], completions: Sequence[str], names: Sequence[str] | None = None
    ) -> PendingRewards:
        """Send every completion to the functions with these names (all if None) without waiting."""
        pending = self.begin(problems, names)
        pending.add(range(len(problems)), completions)
        return pending


def _close(graders: dict[str, Grader]) -> None:
    while graders:
        graders.popitem()[1].close()


def _results(futures: "Sequence[Future[float]]", on_progress: Callable[[int], object]) -> list[float | str]:
    """Return scores and error messages; an interrupt cancels the other questions."""
    results: list[float | str] = []
    try:
        for future in futures:
            try:
                results.append(future.result())
            except Exception as error:
                results.append(error_text(error))
            on_progress(1)
        return results
    except BaseException:
        for future in futures:
            future.cancel()
        raise
