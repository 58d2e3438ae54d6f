"""Base classes of diagnostics: interval, cost and results of a measurement."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutSplit
from lit_rlkv.files import append_if_possible, json_lines, read_if_there, write_atomically
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.run_files import DIAGNOSTICS
from lit_rlkv.settings import PositiveInt, dataclass


@dataclass(eq=False)
class Diagnostic(RLCallback):
    """Base class of diagnostics, which measure every `every` iterations, starting with the first.

    `scalars` go to the metrics of the iteration, and `arrays` (nested lists) to diagnostics.jsonl, for
    figures. The seconds that a measurement took are logged as `time/diagnostics/<name>`.
    """

    name: ClassVar[str]
    every: PositiveInt = 1
    """iterations from one measurement to the next"""

    def __post_init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.arrays: dict[str, Any] = {}
        self._elapsed_s = 0.0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.policy: PolicyModule = pl_module

    def on_rollout_end(self, experience: Experience) -> None:
        if experience.iteration % self.every == 0:
            with self._timed(), torch.no_grad():
                self.measure(experience)

    def on_update_start(self, experience: Experience, split: RolloutSplit) -> None:
        if experience.iteration % self.every == 0:
            with self._timed():
                self.measure_updates(experience, split)

    def measure(self, experience: Experience) -> None:
        """Measure a rollout without gradients; fill `scalars` and `arrays`."""

    def measure_updates(self, experience: Experience, split: RolloutSplit) -> None:
        """Measure before the first update; may compute gradients, but must leave `.grad` unchanged."""

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        if self._elapsed_s > 0:
            metrics.update(self.scalars)
            metrics[f"time/diagnostics/{self.name}"] = self._elapsed_s
        self.scalars, self._elapsed_s = {}, 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self._elapsed_s += time.perf_counter() - started_at


@dataclass(eq=False)
class RowsDiagnostic(Diagnostic):
    """A diagnostic of full-vocabulary distributions on some responses of the rollout."""

    n_rows: PositiveInt = 32
    """measured responses"""
    tokens_per_pass: PositiveInt = TOKENS_PER_PASS
    """most tokens of a forward, padding included"""


class DiagnosticsFile(RLCallback):
    """Appends the arrays of each measurement to diagnostics.jsonl; must come after the diagnostics.

    Each line has the iteration (from 1), the diagnostic's name and its arrays. A resumed run keeps the lines
    up to its checkpoint.
    """

    def __init__(self, run_dir: Path, diagnostics: Sequence[Diagnostic], resumed_at: int = 0) -> None:
        self.path = run_dir / DIAGNOSTICS
        self.diagnostics = diagnostics

        def read(path: Path) -> list[dict[str, Any]]:
            return [row for row in json_lines(path) if row["name"] and row["iteration"] <= resumed_at]

        kept = read_if_there(self.path, read, [])
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        found = [
            {"iteration": iteration, "name": diagnostic.name, **diagnostic.arrays}
            for diagnostic in self.diagnostics
            if diagnostic.arrays
        ]
        append_if_possible(self.path, "".join(json.dumps(row) + "\n" for row in found))
        for diagnostic in self.diagnostics:
            diagnostic.arrays = {}
