"""The rollout against transformers.generate, and what to do with rows that finish: wait, shrink or refill.

    python benchmarks/rollout.py [--device cuda] [--preset 1.5b|tiny] [--batch N] [--new N] [--budgets N ...]
                                 [--schedules] [--record] [--plot FILE]

Every run samples from random weights with no end of sequence, so all rows write `--new` tokens. Before
anything is timed, the plain definitions must replay the log-probs of a rollout that the kernels sampled.
Ours: tokens per second and allocated cache bytes at each budget; the first call apart, because it compiles.
Theirs: transformers.generate with its own dense cache, at the largest batch that fits, found by halving.

`--schedules` times responses of different lengths (each token ends one with a fixed chance) in three ways:
batches that wait for their longest response, rows that the next prompt takes over (`max_rows`), and, from the
measured time of a step at each width, a batch that shrinks to the next power of two as its rows end.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
import torch
from rollout_parts.schedules import print_schedules, time_schedules
from rollout_parts.setting import PAD, PRESETS, Setting

from lit_rlkv.kernels.backend import use_kernels
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


def time_ours(setting: Setting, budget: int) -> dict[str, Any]:
    """Seconds of a short first call and of whole rollouts, tokens per second, bytes."""
    input_ids, cache = setting.prompts(setting.batch), setting.cache(budget)
    on_cuda = setting.device.type == "cuda"
    n_short = 4 * cache.interval  # until the graphs are captured
    check(setting, budget)
    first_s = setting.seconds(lambda: setting.roll_out(input_ids, cache, max_new_tokens=n_short))
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    rollouts: list[Rollout] = []

    def run() -> None:
        rollouts[:] = [setting.roll_out(input_ids, cache)]

    times = setting.timed(run)
    return times | {
        "budget": budget,
        "cache": cache.label,
        "batch": setting.batch,
        "new": setting.new,
        "first_s": first_s,
        "tokens_per_s": setting.batch * setting.new / times["median_s"],
        "kv_mib": rollouts[0].kv_bytes / 2**20,
        "kv_of_dense": rollouts[0].kv_bytes / setting.dense_bytes,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None,
    }


@torch.no_grad()
def time_theirs(setting: Setting) -> dict[str, Any]:
    """transformers.generate at the largest batch that fits, halving from ours."""
    model, batch = setting.plain_model(), setting.batch
    while batch >= 1:
        input_ids = setting.prompts(batch)
        settings = {
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": setting.new,
            "do_sample": True,
            "top_k": 0,
            "pad_token_id": PAD,
            "eos_token_id": None,
        }
        try:
            times = setting.timed(lambda: model.generate(input_ids, **settings))  # noqa: B023 (called at once)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            batch //= 2
            continue
        return times | {
            "cache": "transformers dense",
            "batch": batch,
            "new": setting.new,
            "tokens_per_s": batch * setting.new / times["median_s"],
        }
    raise RuntimeError("not even one row fits transformers.generate; give a smaller --new")


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Tokens per second against the budget, with transformers' as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ours = [row for row in rows if "budget" in row]
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.plot([row["budget"] for row in ours], [row["tokens_per_s"] for row in ours], "o-", label="lit_rlkv")
    for row in rows:
        if row["cache"] == "transformers dense":
            label = f"transformers.generate, dense, batch {row['batch']}"
            axis.axhline(row["tokens_per_s"], linestyle="--", color="grey", label=label)
    axis.set(
        xlabel="budget, keys per layer and KV head",
        ylabel="tokens per second",
        ylim=(0, None),
        title=f"batch {ours[0]['batch']}, {ours[0]['new']:,} new tokens",
    )
    axis.legend()
    figure.savefig(file, dpi=150)


def parse() -> tuple[argparse.Namespace, Setting]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--preset", choices=PRESETS, default="1.5b" if has_cuda else "tiny")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--budgets", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--record", action="store_true", help="append to results/ on a CPU too")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    arguments.budgets = arguments.budgets or list(preset.budgets)
    return arguments, Setting(
        preset=arguments.preset,
        policy=arguments.policy,
        batch=arguments.batch or preset.batch,
        new=arguments.new or preset.new,
        rounds=arguments.rounds,
        device=torch.device(arguments.device),
    )


def main() -> None:
    arguments, setting = parse()
    records = arguments.record or setting.device.type == "cuda"
    common = {"preset": setting.preset, "policy": setting.policy, "rounds": setting.rounds}
    if arguments.schedules:
        found = time_schedules(setting, setting.cache(arguments.budgets[0]))
        if records:
            record.append("rollout", common | {"schedules": found})
        print_schedules(found)
        return
    rows = []
    for budget in arguments.budgets:
        rows.append(time_ours(setting, budget))
        print_row(rows[-1])
    rows.append(time_theirs(setting))
    print_row(rows[-1])
    for row in rows:
        row["over_transformers"] = row["tokens_per_s"] / rows[-1]["tokens_per_s"]
        if records:
            record.append("rollout", common | row)
    print(", ".join(f"{row['cache']}: {row['over_transformers']:.2f} x" for row in rows))
    if arguments.plot:
        plot(rows, arguments.plot)


def print_row(row: dict[str, Any]) -> None:
    low, high = row["spread_s"]
    line = f"{row['cache']:20} batch {row['batch']:4}: {row['tokens_per_s']:10,.0f} tokens/s "
    line += f"(median {row['median_s']:.2f} s, {low:.2f} to {high:.2f})"
    if "kv_mib" in row:
        line += f", cache {row['kv_mib']:,.1f} MiB = {row['kv_of_dense']:.3f} of dense"
        line += f", first call {row['first_s']:.2f} s"
    print(line)


if __name__ == "__main__":
    main()
