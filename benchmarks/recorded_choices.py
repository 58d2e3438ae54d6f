"""The three records that a replay reads: their size, and the replay gap if one of them is left out.

    python benchmarks/recorded_choices.py [--device cuda] [--tokens 96]
    python benchmarks/recorded_choices.py --fast          a look at the output, records nothing

Small random mixtures of experts sample under an evicting cache with top_k and top_p, and record evictions,
sampling masks and experts. The same weights replay all three, all but one, or none. The gap is
|log π − log μ| in nats: the mean over seeds, and the largest of all tokens. A run is a row of
benchmarks/results/recorded_choices.jsonl.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import record
import torch
from routing import CACHE, PRECISIONS, make_model, sample_routed
from text_table import text_table

from lit_rlkv import Rollout, prepare_backbone, replay_logps

NAME = "recorded_choices"
FAMILY = "Qwen3-MoE, 8 of 64"
SAMPLING = {"top_k": 50, "top_p": 0.9}
RECORDS = {
    "evicted_at": "keys that the cache evicted, and when",
    "sampling_masks": "tokens that top_k and top_p left",
    "expert_ids": "experts that the routers chose",
}
REPLAYED = {
    "all three": set(RECORDS),
    **{f"all but {name}": set(RECORDS) - {name} for name in RECORDS},
    "none": set(),
}


@torch.no_grad()
def gap(model: Any, rollout: Rollout, replayed: set[str]) -> dict[str, float]:
    """Return mean and maximum of |log π − log μ| of a learner that replays only these records."""
    left_out = {name: None for name in ("sampling_masks", "expert_ids") if name not in replayed}
    logps = replay_logps(model, replace(rollout, **left_out), shadow="evicted_at" in replayed)
    found = (logps - rollout.rollout_logps).abs()[rollout.response_mask].double()
    return {"mean": float(found.mean()), "max": float(found.max())}


def run(seed: int, precision: str, device: str, n_rows: int, n_tokens: int) -> dict[str, Any]:
    """Return bytes per token of each record, and the gap of each learner."""
    model = prepare_backbone(make_model(FAMILY, seed, device).to(PRECISIONS[precision]))
    rollout = sample_routed(model, seed, n_rows, n_tokens, **SAMPLING)
    n_all = int(rollout.attention_mask.sum())
    return {
        "seed": seed,
        "precision": precision,
        "bytes_per_token": {name: n_bytes / n_all for name, n_bytes in rollout.record_bytes.items()},
        "gaps": {name: gap(model, rollout, replayed) for name, replayed in REPLAYED.items()},
    }


def tables(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of the records and that of the gaps."""
    held = [
        [name, what, f"{fmean(row['bytes_per_token'][name] for row in found):.0f}"]
        for name, what in RECORDS.items()
    ]
    lines = []
    for name in REPLAYED:
        cells = [name]
        for precision in PRECISIONS:
            gaps = [row["gaps"][name] for row in found if row["precision"] == precision]
            mean, largest = fmean(each["mean"] for each in gaps), max(each["max"] for each in gaps)
            cells += [f"{mean:.1e}", f"{largest:.1e}"]
        lines.append(cells)
    measures = [f"{precision}, {measure}" for precision in PRECISIONS for measure in ("mean", "max")]
    return "\n\n".join(
        (
            text_table(("record", "holds", "bytes per token"), held, n_left=2),
            text_table(("replayed", *measures), lines),
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=8, help="sequences (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="response tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="models and rollouts (%(default)s)")
    parser.add_argument(
        "--fast", action="store_true", help="1 seed, 2 sequences of 32 tokens; records nothing"
    )
    asked = parser.parse_args(arguments)
    n_rows, n_tokens, n_seeds = (2, 32, 1) if asked.fast else (asked.rows, asked.tokens, asked.seeds)
    found = [
        run(seed, precision, asked.device, n_rows, n_tokens)
        for seed in range(n_seeds)
        for precision in PRECISIONS
    ]
    sampling = " ".join(f"{name}={value}" for name, value in SAMPLING.items())
    print(f"{FAMILY}, {n_seeds} seeds, {n_rows} sequences of {n_tokens} tokens on {asked.device}")
    print(f"cache {CACHE.label}, {sampling}; gaps in nats\n")
    print(tables(found))
    if not asked.fast:
        settings = {"on": asked.device, "n_rows": n_rows, "n_tokens": n_tokens, "cache": CACHE.label}
        record.append(NAME, settings | SAMPLING | {"family": FAMILY, "figures": found})


if __name__ == "__main__":
    main()
