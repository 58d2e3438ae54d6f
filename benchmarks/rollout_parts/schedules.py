"""Rows that finish: wait for the longest, shrink the batch, or let the next prompt take over."""

import math
import statistics
from typing import Any

from rollout_parts.setting import Setting
from torch import Tensor

from lit_rlkv.kvcache import CacheSpec

RESPONSES_PER_ROW = 4


def time_schedules(setting: Setting, cache: CacheSpec) -> dict[str, Any]:
    """Seconds for several times as many responses, of random lengths, as there are rows."""
    n_rows, n_prompts = setting.batch, RESPONSES_PER_ROW * setting.batch
    input_ids = setting.prompts(n_prompts)
    lengths: list[int] = []
    # Random weights spread the probability nearly evenly, so the share of ending tokens is their chance.
    vocab_size = setting.shape.shape["vocab_size"]
    stop = list(range(1, 1 + max(1, round(vocab_size * RESPONSES_PER_ROW / setting.new))))

    def refill() -> None:
        rollout = setting.roll_out(input_ids, cache, max_rows=n_rows, eos_token_id=stop)
        lengths[:] = rollout.response_mask.sum(dim=1).tolist()

    def wait() -> None:
        for start in range(0, n_prompts, n_rows):
            setting.roll_out(input_ids[start : start + n_rows], cache, eos_token_id=stop)

    for run in (refill, wait):
        run()
    times: dict[str, list[float]] = {"refill": [], "wait": []}
    for _ in range(setting.rounds):
        for run in (refill, wait):
            times[run.__name__].append(setting.seconds(run))
    step_s = {width: step_seconds(setting, input_ids[:width], cache) for width in powers_up_to(n_rows)}
    return {
        "rows": n_rows,
        "responses": n_prompts,
        "mean_length": statistics.mean(lengths),
        "longest": max(lengths),
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "spread_s": {name: [min(values), max(values)] for name, values in times.items()},
        "step_ms": {width: 1e3 * value for width, value in step_s.items()},
        "predicted_s": predicted(lengths, n_rows, step_s),
    }


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return sorted({n, *(2**i for i in range(int(math.log2(n)) + 1))})


def step_seconds(setting: Setting, input_ids: Tensor, cache: CacheSpec) -> float:
    """Return the time of a decode step at this batch size, from a long and a short rollout."""
    short, long = 8 * cache.interval, 24 * cache.interval
    taken = {short: [], long: []}
    for _ in range(setting.rounds):
        for n, times in taken.items():
            times.append(setting.seconds(lambda n=n: setting.roll_out(input_ids, cache, max_new_tokens=n)))
    return (statistics.median(taken[long]) - statistics.median(taken[short])) / (long - short)


def predicted(lengths: list[int], n_rows: int, step_s: dict[int, float]) -> dict[str, float]:
    """Seconds of decoding in each of the three ways, from the time of a step at each width."""
    batches = [lengths[start : start + n_rows] for start in range(0, len(lengths), n_rows)]

    def step_of(n_running: int) -> float:
        return step_s[min(width for width in step_s if width >= n_running)]

    free_at = [0] * n_rows
    for length in lengths:
        free_at[free_at.index(min(free_at))] += length
    return {
        "wait": sum(max(batch) for batch in batches) * step_s[n_rows],
        "shrink": sum(
            step_of(sum(length > step for length in batch)) for batch in batches for step in range(max(batch))
        ),
        "refill": max(free_at) * step_s[n_rows],
    }


def print_schedules(found: dict[str, Any]) -> None:
    """A line for each way."""
    print(
        f"{found['responses']} responses on {found['rows']} rows; lengths: mean {found['mean_length']:.0f}, "
        f"longest {found['longest']}"
    )
    print("a step by width, ms: " + ", ".join(f"{w}: {ms:.2f}" for w, ms in found["step_ms"].items()))
    for name in ("wait", "shrink", "refill"):
        measured = f"{found['median_s'][name]:.2f} s measured, " if name in found["median_s"] else ""
        print(f"{name:7} {measured}{found['predicted_s'][name]:.2f} s by the steps")
