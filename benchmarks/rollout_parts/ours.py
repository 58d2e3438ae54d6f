"""Rollouts of lit_rlkv: refused if the plain definitions disagree, then timed until the time is over."""

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rollout_parts.setting import Setting
from time_limit import TimeLimit
from torch import Tensor

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import replay_logps
from lit_rlkv.types import NEVER, Rollout

MAX_GAP = 1e-3
"""In nats between log-probs of two implementations in float32."""
WEIGHT_SCALE = 4.0
"""Factor of the checked model's weights; at their initial scale attention is too even to show wrong masks."""


def check(setting: Setting, budget: int) -> None:
    """Refuse to time what samples from another distribution than the plain definitions replay.

    Two layers of the same shape in float32 sample with the kernels and graphs under test until they have
    evicted twice; then the plain definitions recompute the log-probs under the recorded evictions.
    """
    small = replace(setting, n_layers=2, dtype=torch.float32)
    for parameter in small.model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(WEIGHT_SCALE)
    cache = small.cache(budget)
    n_new = max(0, budget - small.shape.prompt) + 2 * cache.interval + 3
    rollout = small.roll_out(small.prompts(2), cache, max_new_tokens=n_new)
    if not ((rollout.evicted_at > small.shape.prompt) & (rollout.evicted_at < NEVER)).any():
        raise RuntimeError("nothing was evicted, so the check would show nothing")
    with use_kernels("reference"), torch.no_grad():
        gap = float((replay_logps(small.model, rollout) - rollout.rollout_logps).abs().max())
    if not gap < MAX_GAP:
        raise RuntimeError(f"the plain definitions replay other log-probs, by up to {gap:.1e} nats")


class OutOfTimeError(Exception):
    """The time was over within a rollout."""


@dataclass
class Progress:
    """Tokens decoded at moments of one rollout, for `on_progress` of generate()."""

    limit: TimeLimit
    n_tokens: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def __call__(self, n: int) -> None:
        self.n_tokens.append(self.n_tokens[-1] + n)
        self.seconds.append(time.perf_counter())
        if self.limit.is_over:
            raise OutOfTimeError

    def whole_s(self, n_tokens: int) -> float:
        """Return the seconds of `n_tokens`; the missing ones are as fast as the last half of the others."""
        half = next(i for i, n in enumerate(self.n_tokens) if 2 * n >= self.n_tokens[-1])
        half = min(half, len(self.n_tokens) - 2)
        speed = (self.n_tokens[-1] - self.n_tokens[half]) / (self.seconds[-1] - self.seconds[half])
        return self.seconds[-1] - self.seconds[0] + (n_tokens - self.n_tokens[-1]) / speed


def time_ours(setting: Setting, budget: int, limit: TimeLimit) -> dict[str, Any]:
    """Return seconds of a short first call and of whole rollouts, tokens per second, bytes.

    A rollout that the end of the time cuts off is extrapolated, and its row says so: `integrated` is true.
    """
    input_ids, cache = setting.prompts(setting.batch), setting.cache(budget)
    on_cuda = setting.device.type == "cuda"
    # Until step and eviction are compiled and captured.
    n_short = min(max(0, budget - setting.shape.prompt) + 4 * cache.interval, setting.new)
    check(setting, budget)
    first_s = setting.seconds(lambda: setting.roll_out(input_ids, cache, max_new_tokens=n_short))
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    kv_bytes = n_cut = None
    while len(times) < setting.rounds and not (times and limit.is_over):
        progress = Progress(limit)
        found: list[Rollout | None] = []
        seconds = setting.seconds(lambda: found.append(roll_out(setting, input_ids, cache, progress)))  # noqa: B023
        if found[0] is not None:
            times.append(seconds)
            kv_bytes = found[0].kv_bytes
        elif times:
            break  # whole rollouts are there, and need no part of one
        else:
            times.append(progress.whole_s(setting.batch * setting.new))
            n_cut = progress.n_tokens[-1] // setting.batch
            break
    median_s = statistics.median(times)
    return {
        "budget": budget,
        "compile_layers": setting.compile_layers,
        "cache": cache.label,
        "batch": setting.batch,
        "new": setting.new,
        "integrated": n_cut is not None,
        "measured_new": n_cut or setting.new,
        "median_s": median_s,
        "spread_s": [min(times), max(times)],
        "first_s": first_s,
        "tokens_per_s": setting.batch * setting.new / median_s,
        "kv_mib": None if kv_bytes is None else kv_bytes / 2**20,
        "kv_of_dense": None if kv_bytes is None else kv_bytes / setting.dense_bytes,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None,
    }


def roll_out(setting: Setting, input_ids: Tensor, cache: CacheSpec, progress: Progress) -> Rollout | None:
    """Return a rollout, or None if the time was over before its end."""
    try:
        return setting.roll_out(input_ids, cache, on_progress=progress)
    except OutOfTimeError:
        return None
