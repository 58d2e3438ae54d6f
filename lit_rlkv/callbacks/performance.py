"""Time, memory and flops of the parts of an iteration."""

import time
from typing import Any

import torch

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.callbacks.flop_counter import PassCounter
from lit_rlkv.callbacks.memory import Meter
from lit_rlkv.diagnostics.flops import costs_of, sampler_work
from lit_rlkv.diagnostics.peak import peak_flops
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.hydra import acting_as


class Performance(Diagnostic):
    """`time/*`, `memory/*` and `perf/*` of the phases of an iteration: rollout, score, reward, update.

    The host waits for the device where a phase starts and ends, and nowhere else. Each rank reports on its
    own device.

    Args:
        peak_flops: most flops per second of a device at the run's precision, to measure utilisation by; None
            looks the device up, and where it is not known only what was achieved is logged.
    """

    name = "performance"

    def __init__(self, every: int = 1, peak_flops: float | int | None = None) -> None:
        super().__init__(every)
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(
                f"diagnostics.performance.peak_flops={peak_flops} is no speed; give flops per second such as "
                "9.9e14, or null to look the device up"
            )
        self.peak_flops = peak_flops
        self.meter = Meter(torch.device("cpu"))
        self._seconds: dict[str, float] = {}
        self._started_at = 0.0
        self._is_looked_up = peak_flops is not None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self.meter = Meter(self.policy.roles.backbone("policy").device)
        self.passes = PassCounter(self.policy.roles)

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if iteration % self.every != 0:
            return
        self.meter.wait()
        with self._timed():
            self.meter.reset_peak()
            if phase == "update":
                self.passes.start()
        self._started_at = time.perf_counter()

    def on_phase_end(self, phase: str, iteration: int) -> None:
        if iteration % self.every != 0:
            return
        self.meter.wait()
        self._seconds[phase] = time.perf_counter() - self._started_at
        with self._timed():
            self.scalars |= {f"memory/{phase}/{name}": value for name, value in self.meter.read().items()}
            if phase == "update":  # the loop itself logs its time
                self.passes.stop()
                self._add_speed(phase, self.passes.n_learned, self.passes.flops)
            else:
                self.scalars[f"time/{phase}"] = self._seconds[phase]

    def measure(self, experience: Experience) -> None:
        """Speed of the rollout.

        Raises:
            ValueError: the data module does not announce its phases.
        """
        if "rollout" not in self._seconds:
            raise ValueError(
                "Performance was told of no rollout, so it cannot time one; give RolloutDataModule "
                "on_phase_start=[diagnostic.on_phase_start], on_phase_end=[diagnostic.on_phase_end]"
            )
        n_sampled = int(experience.rollout.response_mask.sum())
        with acting_as(self.policy.roles, "policy") as backbone:
            costs = costs_of(backbone)
            self._look_up(backbone.dtype)
        flops = None
        if costs is not None:
            work, n_positions = sampler_work(experience.rollout, experience.group_size)
            flops = float(costs.forward(work)) + n_positions * costs.forward_per_position
        self._add_speed("rollout", n_sampled, flops)

    def _add_speed(self, phase: str, n_tokens: float | int, flops: float | None) -> None:
        elapsed_s = self._seconds[phase]
        self.scalars[f"perf/tokens_per_second/{phase}"] = n_tokens / elapsed_s
        if flops is None:
            return
        self.scalars[f"perf/tflops/{phase}"] = flops / elapsed_s / 1e12
        if self.peak_flops is not None:
            self.scalars[f"perf/mfu/{phase}"] = flops / elapsed_s / self.peak_flops

    def _look_up(self, dtype: torch.dtype) -> None:
        """Find the peak of this device once, at the precision of its products."""
        if self._is_looked_up:
            return
        device = self.meter.device
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        self.peak_flops = peak_flops(device, dtype)
        self._is_looked_up = True
