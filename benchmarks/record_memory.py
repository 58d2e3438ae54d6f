"""Memory of the record of evictions, by response token: where it is, and what it takes to copy it.

    python benchmarks/record_memory.py [--responses 64] [--tokens 256] [--record]

A decoder of random weights with 8 layers of 4 KV heads samples all responses at once, under a budget of 64
keys, and their rows are copied 8 at a time. Printed are bytes for each token of prompts and responses:

    decoding      the tables that the cache writes while it decodes, on the device
    reading       what the device takes beside them at most to copy rows that have ended, with their tokens
    device_bytes  the record that waits for the update on the device
    host_bytes    the same in host memory
    pass          for each token of a pass of the update: its part of the record, on the device

On a CPU both memories are one, and the record is counted apart. PYTHONPATH=CHECKOUT measures another version.
"""

import argparse
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import command_line
import record
import torch
from live_bytes import LiveBytes, storage_bytes
from text_table import text_table
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_rlkv import CacheSpec, generate, prepare_backbone
from lit_rlkv.models.packing import passes
from lit_rlkv.rollout import decode_loop, recorders
from lit_rlkv.rollout.decoder import Decoder

NAME = "record_memory"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 32,
}
COLUMNS = ("decoding", "reading", "device_bytes", "host_bytes", "pass")
ROWS_AT_ONCE, PROMPT, TOKENS_PER_PASS = 8, 16, 1024
CACHE = CacheSpec("streaming", budget=64, interval=16, sink=4, window=16)


def measure(n_responses: int, n_tokens: int) -> dict[str, float]:
    """Return the bytes of each of `COLUMNS`."""
    torch.manual_seed(0)
    model = prepare_backbone(Qwen3ForCausalLM(Qwen3Config(**SHAPE)))
    prompts = torch.randint(3, SHAPE["vocab_size"], (n_responses, PROMPT))
    read_rows, tables, before = Decoder.read_rows, 0, 0
    at_once = ROWS_AT_ONCE * (PROMPT + n_tokens)

    def read(decoder: Decoder, rows: Sequence[int]) -> Any:
        nonlocal tables, before
        if not tables:
            tables = storage_bytes(layer.evicted_at for layer in decoder.kv.slot_layers)
            meter.reset_peak()
            before = meter.live
        return read_rows(decoder, rows)

    with (
        LiveBytes(model.parameters()) as meter,
        patch.object(Decoder, "read_rows", read),
        patch.object(decode_loop, "READ_AT_ONCE", at_once, create=True),
    ):
        rollout = generate(
            model,
            prompts,
            torch.ones_like(prompts),
            cache=CACHE,
            max_new_tokens=n_tokens,
            eos_token_id=None,
            pad_token_id=0,
            generator=torch.Generator().manual_seed(0),
        )
    kept = storage_bytes([rollout.record.evicted_at])
    on_host = kept if hasattr(recorders, "HOST") else 0
    _, part = next(passes(rollout, TOKENS_PER_PASS))
    n_all = rollout.input_ids.numel()
    return {
        "decoding": tables / n_all,
        "reading": (meter.peak_bytes() - before - on_host) / n_all,
        "device_bytes": (kept - on_host) / n_all,
        "host_bytes": on_host / n_all,
        "pass": part.record.evicted_at.nbytes / part.input_ids.numel(),
    }


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--responses", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=256)
    args: argparse.Namespace = parser.parse_args()
    shown = []
    for n_responses in args.responses:
        found = measure(n_responses, args.tokens)
        record.append(NAME, {"responses": n_responses, "tokens": args.tokens, **found})
        shown.append([str(n_responses), *(f"{found[name]:.1f}" for name in COLUMNS)])
    print(text_table(["responses", *COLUMNS], shown))


if __name__ == "__main__":
    main()
