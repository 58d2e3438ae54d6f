"""What metrics are drawn over: iterations, sampled tokens and seconds of training, all of the whole run."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlkv.callbacks.hooks import RLCallback

ITERATION, TOKENS, SECONDS = "iteration", "rollout/tokens", "time/wall_clock_s"
AXES = (ITERATION, TOKENS, SECONDS)

Place = dict[str, float]
"""A value on each of the AXES: where in the run something belongs."""

History = Sequence[Mapping[str, float | int]]


class RunAxes(RLCallback):
    """Adds `rollout/tokens` and `time/wall_clock_s`; stands behind the statistics of the rollout.

    Both go on where an earlier part of the run ended, whose rows `history` holds. The time in which a run was
    down does not count, nor do iterations that are done again.
    """

    def __init__(self, history: History = ()) -> None:
        earlier = place_of(history)
        self.n_tokens = earlier[TOKENS]
        self.earlier_s = earlier[SECONDS]
        self._started_at = time.perf_counter()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._started_at = time.perf_counter()

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self.n_tokens += metrics["num_tokens"]
        metrics[TOKENS] = self.n_tokens
        metrics[SECONDS] = self.earlier_s + time.perf_counter() - self._started_at


def place_of(history: History) -> Place:
    """The place of the last row; the start of the run if there is none."""
    return {axis: float(history[-1][axis]) if history else 0.0 for axis in AXES}
