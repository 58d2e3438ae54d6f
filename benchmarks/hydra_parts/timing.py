"""Time of a run per sample, and of scoring with passes stacked or separate."""

import statistics
import time
from dataclasses import dataclass

import torch
from hydra_parts.measure import make_meter
from hydra_parts.runs import Run
from hydra_parts.setting import Setting

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.models.hydra import Roles
from lit_rlkv.types import Rollout


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


@dataclass(frozen=True)
class PassCost:
    """Scoring one rollout by reference, reward model and critic."""

    seconds: float
    peak_bytes: int
    """Above the parameters."""


def measure_passes(run: Run, roles: Roles, batch: int, n_rounds: int) -> dict[bool, PassCost]:
    """With the passes of a backbone stacked and one after the other, taking turns."""
    rollout = run.make_data(batch, RLCallback()).collect().rollout
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 + n_rounds):
        for stacks, mine in times.items():
            started_at = time.perf_counter()
            _score(run.setting, roles, rollout, stacks)
            mine.append(time.perf_counter() - started_at)
    costs = {}
    for stacks, mine in times.items():
        with make_meter(roles, run.setting.device) as meter:
            before = meter.peak_bytes()
            _score(run.setting, roles, rollout, stacks)
            costs[stacks] = PassCost(statistics.median(mine[1:]), meter.peak_bytes() - before)
    return costs


def _score(setting: Setting, roles: Roles, rollout: Rollout, stacks: bool) -> None:
    views = {"reference": True, "reward": setting.cache.is_dense, "value": True}
    score_rollout(roles, rollout, views, temperature=1.0, stacks_passes=stacks)
    if setting.device == "cuda":
        torch.cuda.synchronize()
