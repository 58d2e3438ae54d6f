"""Processor seconds and peak memory of a GRPO step at long responses on a CPU, beside GRPOTrainer of TRL.

    python benchmarks/peers_long.py [--lengths 256 1024 2048] [--rounds 1] [--record]
    python benchmarks/peers_long.py --table        the rows of the last records, as in the docs

Layers of SmolLM2-135M's shape with random weights, few of the 30, and as small a share of its vocabulary, so
that layers and head have their shares of the work. 16 responses of equal length; all else is as in peers.py.
Each trainer has a process of its own with one thread and the settings of its defaults, and their steps
alternate. The first step is not counted, unless it is the only one. Memory is the peak of the whole process.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import command_line
import peers
import record
import torch
from shapes import SMOLLM2
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.reporting.tables import markdown_table

NAME = "peers_long"
N_PROMPTS, GROUP_SIZE = 2, 8
TRL = "TRL"
TRAINERS: dict[str, Any] = {
    TRL: {},
    "TRL, evicting": {"cache_policy": "h2o", "cache_budget": 128, "cache_interval": 32},
    "lit_rlkv, all keys": ["cache.policy=dense"],
    "lit_rlkv, h2o 128+32": ["cache.policy=h2o", "cache.budget=128", "cache.interval=32"],
}
"""Caches of the trainers: fields of EvictingGRPOConfig, or settings of this project."""
HEADINGS = ("tokens", "trainer", "generate, s", "update, s", "step, s", "times as fast", "peak, MiB")


def write_model(folder: Path, n_layers: int) -> None:
    """Write a Llama of `n_layers` with its tokenizer; see the module."""
    tokenizer = build_task_tokenizer()
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    n_tokens = SMOLLM2["vocab_size"] * n_layers // SMOLLM2["num_hidden_layers"]
    shape = SMOLLM2 | {"vocab_size": n_tokens, "num_hidden_layers": n_layers}
    config = LlamaConfig(
        **shape,
        **ids,
        bos_token_id=None,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    peers.save_endless(LlamaForCausalLM(config), tokenizer, folder)


def compare(n_tokens: int, n_layers: int, n_rounds: int) -> dict[str, Any]:
    """Alternate the steps of all trainers, and return the row of the record."""
    peers.N_PROMPTS, peers.GROUP_SIZE, peers.N_TOKENS = N_PROMPTS, GROUP_SIZE, n_tokens
    peers.N_WARM = min(1, n_rounds - 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, n_layers)
        trainers = {
            who: peers.TrainerProcess(sys.executable, folder, n_rounds, cache, f"trainer{place}")
            for place, (who, cache) in enumerate(TRAINERS.items())
        }
        for _ in range(n_rounds):
            for trainer in trainers.values():
                trainer.step()
        for trainer in trainers.values():
            trainer.close()
    theirs = trainers[TRL].steps
    expected = N_PROMPTS * GROUP_SIZE * n_tokens
    assert all(step.n_tokens == expected for each in trainers.values() for step in each.steps)
    found = {
        who: {
            "seconds": {k: round(v, 3) for k, v in peers.medians(trainer.steps).items()},
            "peak_mib": max(step.peak_mib for step in trainer.steps),
            **peers.times_as_fast(trainer.steps, theirs),
        }
        for who, trainer in trainers.items()
    }
    version = trainers[TRL].version
    return {"n_tokens": n_tokens, "n_layers": n_layers, "trl_version": version, "trainers": found}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/results/kernels.md, a line for each length and trainer."""
    lines = []
    for row in rows:
        for who, found in row["trainers"].items():
            seconds = (f"{found['seconds'][phase]:.1f}" for phase in ("generate", "update", "total"))
            speed = "1" if who == TRL else f"{found['times_as_fast']:.2f}"
            lines.append([str(row["n_tokens"]), who, *seconds, speed, str(found["peak_mib"])])
    return markdown_table(HEADINGS, lines)


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--layers", type=int, default=3, help="of 30")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each trainer")
    parser.add_argument("--table", action="store_true", help="print the last rows, measure nothing")
    args = parser.parse_args()
    if args.table:
        latest = {row["n_tokens"]: row for row in record.rows(NAME)}
        print(table([latest[length] for length in sorted(latest)]))
        return
    for n_tokens in args.lengths:
        row = compare(n_tokens, args.layers, args.rounds)
        print(table([row]), flush=True)
        record.append(NAME, row)


if __name__ == "__main__":
    main()
