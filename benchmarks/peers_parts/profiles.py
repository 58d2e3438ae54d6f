"""Where the time of an iteration goes: operations of PyTorch by kind, and Python."""

import time
from collections import defaultdict
from typing import Any

from text_table import text_table
from torch.profiler import ProfilerActivity, profile

from lit_rlkv.callbacks.hooks import RLCallback

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mkldnn", "linear_pointwise", "matmul", "addbmm"),
    "attention": ("scaled_dot_product", "flash_attention", "softmax"),
    "copies, gathers": ("copy_", "index", "gather", "scatter", "cat", "clone", "slice_backward", "embedding"),
    "optimizer": ("fused_adam", "foreach", "addcmul_", "addcdiv_", "lerp_"),
    "allocation": ("empty", "zeros", "fill_", "zero_", "full", "ones"),
}
"""Kinds of operations by substrings of their names, the first that matches."""
OTHER, PYTHON = "elementwise, sums", "Python, dispatch, autograd"
PARTS = {"rollout": "generate", "update": "update"}


def kind_of(name: str) -> str:
    """Return the kind of an operation such as `aten::addmm`."""
    base = name.rpartition("::")[2]
    for kind, parts in KINDS.items():
        if any(base == part or (len(part) > 4 and part in base) for part in parts):
            return kind
    return OTHER


class Profiles(RLCallback):
    """Profiles rollout and update of every second iteration after the first ones, and times the others."""

    def __init__(self, n_warm: int) -> None:
        self.n_warm = n_warm
        self.n_timed = 0
        self.wall_s: dict[str, float] = defaultdict(float)
        self.operations: dict[str, dict[str, tuple[float, int]]] = {part: {} for part in PARTS}
        self.n_profiled = 0
        self._profiler: Any = None
        self._started_at = 0.0

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase not in PARTS or iteration < self.n_warm:
            return
        if iteration % 2:
            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.__enter__()
        self._started_at = time.perf_counter()

    def on_phase_end(self, phase: str, iteration: int) -> None:
        if phase not in PARTS or iteration < self.n_warm:
            return
        if self._profiler is None:
            self.wall_s[phase] += time.perf_counter() - self._started_at
            self.n_timed += phase == "update"
            return
        self._profiler.__exit__(None, None, None)
        found = self.operations[phase]
        for event in self._profiler.key_averages():
            seconds, count = found.get(event.key, (0.0, 0))
            found[event.key] = (seconds + 1e-6 * event.self_cpu_time_total, count + event.count)
        self._profiler = None
        self.n_profiled += phase == "update"

    def table(self) -> str:
        """Return milliseconds and calls per step by kind, for rollout and update."""
        rows: dict[str, list[str]] = {kind: [] for kind in (*KINDS, OTHER, PYTHON, "all")}
        for part in PARTS:
            seconds, calls = defaultdict(float), defaultdict(int)
            for name, (found, count) in self.operations[part].items():
                if "::" in name and not name.startswith("autograd::"):
                    seconds[kind_of(name)] += found / self.n_profiled
                    calls[kind_of(name)] += count // self.n_profiled
            wall_s = self.wall_s[part] / self.n_timed
            seconds[PYTHON] = wall_s - sum(seconds.values())
            seconds["all"] = wall_s
            for kind, cells in rows.items():
                cells += [f"{1e3 * seconds[kind]:.1f}", f"{calls[kind]}" if kind in calls else ""]
        headings = [cell for part in PARTS.values() for cell in (f"{part} ms", "calls")]
        return text_table(["per step", *headings], [[kind, *cells] for kind, cells in rows.items()])

    def largest(self, n: int = 12) -> str:
        """Return the operations that take most time."""
        rows = [
            [f"{PARTS[part]} {name}", f"{1e3 * seconds / self.n_profiled:.1f}", str(count // self.n_profiled)]
            for part in PARTS
            for name, (seconds, count) in self.operations[part].items()
        ]
        rows.sort(key=lambda row: -float(row[1]))
        return text_table(["operation", "ms", "calls"], rows[:n])
