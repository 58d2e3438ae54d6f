"""Rollouts of lit_rlkv: refused if the plain definitions disagree, then timed until the time is over."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
    rollout = small.roll_out(small.prompts(2), cache, n_tokens=n_new)
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
        """Return the seconds of `n_tokens`; the missing ones are as fast as the last half of the others.

        Raises:
            OutOfTimeError: the time was over before the first token.
        """
        if len(self.n_tokens) < 2:
            raise OutOfTimeError("the time was over before the first token")
        half = next(i for i, n in enumerate(self.n_tokens) if 2 * n >= self.n_tokens[-1])
        half = min(half, len(self.n_tokens) - 2)
        speed = (self.n_tokens[-1] - self.n_tokens[half]) / (self.seconds[-1] - self.seconds[half])
        return self.seconds[-1] - self.seconds[0] + (n_tokens - self.n_tokens[-1]) / speed


def time_ours(setting: Setting, budget: int, limit: TimeLimit) -> Iterator[dict[str, Any]]:
    """Yield rows of seconds, tokens per second and bytes: a first estimate, then whole rollouts.

    The first call compiles and captures step and eviction; its last half, extrapolated, is the estimate. A
    rollout that the end of the time cuts off is extrapolated, too. Such rows say `integrated`.
    """
    input_ids, cache = setting.prompts(setting.batch), setting.cache(budget)
    on_cuda = setting.device.type == "cuda"
    # Until step and eviction are compiled and captured.
    n_short = min(max(0, budget - setting.shape.prompt) + 4 * cache.interval, setting.new)
    check(setting, budget)
    first = Call.of(setting, input_ids, cache, limit, max_new_tokens=n_short)
    row = {
        "budget": budget,
        "compile_layers": setting.compile_layers,
        "cache": cache.label,
        "batch": setting.batch,
        "new": setting.new,
        "first_s": first.seconds,
    }
    # Even a whole one: its seconds are those of compilation.
    yield row | summary(setting, [replace(first, rollout=None)])
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    calls: list[Call] = []
    while len(calls) < setting.rounds and not limit.is_over:
        calls.append(Call.of(setting, input_ids, cache, limit, max_new_tokens=setting.new))
    # Whole rollouts need no part of one beside them.
    calls = [call for call in calls if call.rollout is not None] or calls
    if calls:
        yield row | summary(setting, calls)


@dataclass(frozen=True)
class Call:
    """A timed call of generate()."""

    seconds: float
    n_tokens: int
    """Sampled in all rows."""
    whole_s: float
    """Seconds of a rollout with all tokens; missing ones are as fast as the last half of the others."""
    rollout: Rollout | None
    """None if the call sampled fewer tokens than a whole rollout has."""

    @classmethod
    def of(
        cls, setting: Setting, input_ids: Tensor, cache: CacheSpec, limit: TimeLimit, max_new_tokens: int
    ) -> "Call":
        """Time a call, until the end of the time at most."""
        n_whole = setting.batch * setting.new
        progress, found = Progress(limit), list[Rollout]()

        def call() -> None:
            with suppress(OutOfTimeError):
                options = {"on_progress": progress, "n_tokens": max_new_tokens}
                found.append(setting.roll_out(input_ids, cache, **options))

        seconds = setting.seconds(call)
        is_whole = bool(found) and max_new_tokens == setting.new
        n_tokens = n_whole if is_whole else progress.n_tokens[-1]
        return cls(
            seconds,
            n_tokens,
            seconds if is_whole else progress.whole_s(n_whole),
            found[0] if is_whole else None,
        )


def summary(setting: Setting, calls: Sequence[Call]) -> dict[str, Any]:
    """Return the figures of calls that are all whole, or all not."""
    times, last = [call.whole_s for call in calls], calls[-1].rollout
    median_s = statistics.median(times)
    on_cuda = setting.device.type == "cuda"
    return {
        "integrated": last is None,
        "measured_new": calls[-1].n_tokens // setting.batch,
        "median_s": median_s,
        "spread_s": [min(times), max(times)],
        "tokens_per_s": setting.batch * setting.new / median_s,
        "kv_mib": None if last is None else last.kv_bytes / 2**20,
        "kv_of_dense": None if last is None else last.kv_bytes / setting.dense_bytes,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None,
    }
