"""Time of a run per sample."""

import statistics
from dataclasses import dataclass

from hydra_parts.runs import Run

from lit_rlkv.callbacks.hooks import RLCallback


class Clock(RLCallback):
    """Seconds of rollout and update, iteration by iteration, as the loop reports them."""

    def __init__(self) -> None:
        self.rollout: list[float] = []
        self.update: list[float] = []

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self.rollout.append(metrics["time/data"])
        self.update.append(metrics["time/update"])


@dataclass(frozen=True)
class Seconds:
    """Per sample."""

    rollout: float
    update: float

    @property
    def total(self) -> float:
        return self.rollout + self.update


def measure_seconds(run: Run, batch: int, n_rounds: int) -> Seconds:
    """Medians over the iterations after the first, which warms up; no meter is on."""
    clock = Clock()
    run.train(batch, 1 + n_rounds, clock)
    return Seconds(*(statistics.median(times[1:]) / batch for times in (clock.rollout, clock.update)))
