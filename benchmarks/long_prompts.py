"""Memory and time of long prompts: in one piece and in chunks, under a cache of 256 keys.

    python benchmarks/long_prompts.py [--tokens 1024 4096 16384] [--chunk 512] [--record]
    python benchmarks/long_prompts.py --report              the tables

A random model of the shape of SmolLM2-135M, in float32 on a CPU, samples a few tokens after each prompt. Each
measurement is a process of its own and a row: `allocated_mib`, the
most bytes of tensors at once above the weights, and `resident_mib`, by how much the peak of the process's
memory exceeds what it held before. A learner with LoRA of rank 8 on all layers, whose activations are
recomputed by layer, then replays the rollout forward and backward. `cpu_seconds` are of the whole rollout,
the least of several in turns, of both ways in one process; they count the process alone, not its neighbours.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import command_line
import record
import torch
from live_bytes import LiveBytes
from sampled import sample
from shapes import SMOLLM2
from text_table import text_table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, prepare_backbone, replay_logps
from lit_rlkv.models.activations import checkpoint_layers
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter

NAME = "long_prompts"
CACHE = CacheSpec("snapkv", budget=256, interval=64, sink=4, window=16)
CONFIG = LlamaConfig(**SMOLLM2, max_position_embeddings=32_768, tie_word_embeddings=True)
WAYS = ("one piece", "chunks")
N_NEW, N_REPEATS = 8, 2
MIB = 2**20


def make_model(config: LlamaConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return prepare_backbone(LlamaForCausalLM(config).eval())


def roll_out(model: PreTrainedModel, n_tokens: int, chunk: int | None) -> Rollout:
    generator = torch.Generator().manual_seed(n_tokens)
    input_ids = torch.randint(3, model.config.vocab_size, (1, n_tokens), generator=generator)
    return sample(model, input_ids, CACHE, N_NEW, generator, prefill_chunk=chunk)


def resident_mib(field: str) -> float:
    """Return a line of /proc/self/status: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def memory(work: Any, model: PreTrainedModel) -> dict[str, float]:
    """Return the peaks of a function above what is there before."""
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident
    with LiveBytes(model.parameters()) as meter:
        held = meter.live
        work()
    return {
        "allocated_mib": (meter.peak_bytes() - held) / MIB,
        "resident_mib": resident_mib("VmHWM") - before,
    }


def measure(part: str, n_tokens: int, chunk: int | None, config: LlamaConfig = CONFIG) -> dict[str, Any]:
    """Return one measurement: the memory of a rollout or of its learner, or the time of both ways."""
    model = make_model(config)
    if part == "rollout":
        return memory(lambda: roll_out(model, n_tokens, chunk), model)
    if part == "time":
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(N_REPEATS):
            for way, size in zip(WAYS, (None, chunk), strict=True):
                started_at = time.process_time()
                roll_out(model, n_tokens, size)
                seconds[way].append(time.process_time() - started_at)
        return {"cpu_seconds": {way: min(found) for way, found in seconds.items()}}
    rollout = roll_out(model, n_tokens, chunk)
    model.requires_grad_(False)
    add_adapter(model, "policy", LoraSpec(rank=8, alpha=16, target_modules="all-linear"))
    checkpoint_layers(model)
    with use_adapter(lora_layers(model), "policy"):
        return memory(lambda: replay_logps(model.train(), rollout).sum().backward(), model)


def measure_apart(cell: dict[str, Any]) -> None:
    """Measure in a process of its own, and record the row."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = cell | json.loads(found.splitlines()[-1])
    record.append(NAME, row)
    print(row, flush=True)


def tables(rows: list[dict]) -> str:
    """Return the latest measurement of each cell as text."""
    latest = {(row["part"], row["n_tokens"], row["chunk"]): row for row in rows}
    order = sorted(latest, key=lambda cell: (cell[0] == "learner", cell[1], cell[2] or 0))
    peaks = [
        [part, f"{n_tokens:,}", str(chunk or "one piece")]
        + [f"{latest[part, n_tokens, chunk][name]:.0f}" for name in ("allocated_mib", "resident_mib")]
        for part, n_tokens, chunk in order
        if part != "time"
    ]
    seconds = [
        [f"{n_tokens:,}", str(chunk), *(f"{found[way]:.1f}" for way in WAYS), f"{ratio(found):.2f}"]
        for part, n_tokens, chunk in order
        if part == "time" and (found := latest[part, n_tokens, chunk]["cpu_seconds"])
    ]
    return "\n\n".join(
        [
            text_table(["peak of", "prompt", "chunk", "allocated, MiB", "resident, MiB"], peaks),
            text_table(["prompt", "chunk", "one piece, s", "chunks, s", "ratio"], seconds),
        ]
    )


def ratio(seconds: dict[str, float]) -> float:
    """Return the time of chunks over that of one piece."""
    return seconds["chunks"] / seconds["one piece"]


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--whole-up-to", type=int, default=4096, help="longest prompt to read in one piece")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cell is not None:
        print(json.dumps(measure(**args.cell)))
        return
    if not args.report:
        for n_tokens in args.tokens:
            measure_apart({"part": "rollout", "n_tokens": n_tokens, "chunk": args.chunk})
            if n_tokens <= args.whole_up_to:
                for part, chunk in (("rollout", None), ("learner", args.chunk)):
                    measure_apart({"part": part, "n_tokens": n_tokens, "chunk": chunk})
        if args.whole_up_to in args.tokens:
            measure_apart({"part": "time", "n_tokens": args.whole_up_to, "chunk": args.chunk})
    print(tables(record.rows(NAME)))


if __name__ == "__main__":
    main()
