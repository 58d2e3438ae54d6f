"""Tokens per second of TRL's GRPOTrainer and of EvictingGRPOTrainer on a CPU, side by side.

    python benchmarks/trl_side_by_side.py [--rounds 9] [--record]
    python benchmarks/trl_side_by_side.py --table          the rows of the last record, as in the docs

Model, prompts, reward and settings are those of peers.py; both trainers get the same arguments but for the
cache. Each runs in a process of its own with one thread, and their steps alternate, so that a busy machine
slows all of them. All responses have the same length.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import command_line
import peers
import record
import torch

from lit_rlkv.reporting.tables import markdown_table

NAME = "trl_side_by_side"
OURS: dict[str, dict[str, Any]] = {
    "all keys": {"cache_policy": "dense"},
    "random 16+5": {"cache_policy": "random", "cache_budget": 16, "cache_interval": 5, "cache_window": 8},
    "snapkv 16+5": {"cache_policy": "snapkv", "cache_budget": 16, "cache_interval": 5, "cache_window": 8},
}
"""Caches of EvictingGRPOTrainer, by name: fields of its config."""
TRL = "TRL"
HEADINGS = (
    "trainer",
    "generate, ms",
    "update, ms",
    "step, ms",
    "tokens/s, rollout",
    "tokens/s, step",
    "of TRL's",
)


def compare(n_rounds: int) -> dict[str, Any]:
    """Alternate the steps of all trainers, and return the row of the record."""
    n_steps = peers.N_WARM + n_rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers.write_model(folder)
        trainers = {TRL: peers.TrainerProcess(sys.executable, folder, n_steps)}
        for place, (who, cache) in enumerate(OURS.items()):
            trainers[who] = peers.TrainerProcess(sys.executable, folder, n_steps, cache, f"ours{place}")
        for _ in range(n_steps):
            for trainer in trainers.values():
                trainer.step()
        for trainer in trainers.values():
            trainer.close()
    theirs = trainers[TRL].steps
    n_tokens = theirs[0].n_tokens
    assert all(step.n_tokens == n_tokens for each in trainers.values() for step in each.steps)
    found = {}
    for who, trainer in trainers.items():
        seconds = peers.medians(trainer.steps)
        found[who] = {
            "seconds": {phase: round(value, 4) for phase, value in seconds.items()},
            "tokens_per_second": round(n_tokens / seconds["total"]),
            "rollout_tokens_per_second": round(n_tokens / seconds["generate"]),
            **peers.times_as_fast(trainer.steps, theirs),
        }
    return {
        "trl_version": trainers[TRL].version,
        "n_trained": trainers[TRL].n_trained,
        "n_tokens": n_tokens,
        "n_rounds": n_rounds,
        "trainers": found,
    }


def table(row: dict[str, Any]) -> str:
    """Return the table of docs/how-to/inside-trl.md, a line for each trainer."""
    rows = []
    for who, found in row["trainers"].items():
        seconds, (low, high) = found["seconds"], found["times_as_fast_range"]
        rows.append(
            [
                f"TRL {row['trl_version']}" if who == TRL else f"evicting, {who}",
                *(f"{1e3 * seconds[phase]:.0f}" for phase in ("generate", "update", "total")),
                str(found["rollout_tokens_per_second"]),
                str(found["tokens_per_second"]),
                "1" if who == TRL else f"{found['times_as_fast']:.2f} ({low:.2f} to {high:.2f})",
            ]
        )
    return markdown_table(HEADINGS, rows)


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each that are counted")
    parser.add_argument(
        "--table", action="store_true", help="print the last row of the record, measure nothing"
    )
    args = parser.parse_args()
    if args.table:
        print(table(record.rows(NAME)[-1]))
        return
    torch.set_num_threads(1)
    row = compare(args.rounds)
    print(table(row))
    record.append(NAME, row)


if __name__ == "__main__":
    main()
