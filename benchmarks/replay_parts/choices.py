"""The records of a mixture of experts: their size, and the gap of a replay without one of them."""

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import record
import torch
from sampled import gap, sample
from text_table import text_table
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from lit_rlkv import CacheSpec, Rollout, prepare_backbone, replay_logps

NAME = "recorded_choices"
FAMILY = "Qwen3-MoE, 8 of 64"
VOCAB, HIDDEN, LAYERS = 1024, 128, 6
N_NEW = 96
LAYER_SCALE, HEAD_SCALE = 4.0, 20.0
"""Factors on initial weights: a product over 128 columns then has the size of one over 2,048 at the usual
standard deviation, and log-probs are about -2, as of a pretrained model."""
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2, intermediate_size=2 * HIDDEN, moe_intermediate_size=HIDDEN // 2,
    tie_word_embeddings=False, pad_token_id=0, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHE = CacheSpec("snapkv", budget=24, interval=8, sink=2, window=4)
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


def make_model(seed: int, device: str) -> PreTrainedModel:
    """Return a random model in float32."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG).to(device).eval()
    model.lm_head.weight.data.mul_(HEAD_SCALE)
    for parameter in model.model.layers.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(LAYER_SCALE)
    return model


@torch.no_grad()
def gap_without(model: Any, rollout: Rollout, replayed: set[str]) -> dict[str, float]:
    """Return the gap of a learner that replays only these records."""
    left_out = {name: None for name in ("sampling_masks", "expert_ids") if name not in replayed}
    left = rollout.with_record(**left_out)
    return gap(replay_logps(model, left, shadow="evicted_at" in replayed), rollout)


def measure(seed: int, precision: str, device: str, n_rows: int, n_tokens: int) -> dict[str, Any]:
    """Return bytes per token of each record, and the gap of each learner."""
    model = prepare_backbone(make_model(seed, device).to(PRECISIONS[precision]))
    generator = torch.Generator(model.device).manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (n_rows, 16), generator=generator, device=model.device)
    rollout = sample(model, input_ids, CACHE, n_tokens, generator, record_routing=True, **SAMPLING)
    n_all = int(rollout.attention_mask.sum())
    return {
        "seed": seed,
        "precision": precision,
        "bytes_per_token": {name: n_bytes / n_all for name, n_bytes in rollout.record.part_bytes.items()},
        "gaps": {name: gap_without(model, rollout, replayed) for name, replayed in REPLAYED.items()},
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


def run(asked: argparse.Namespace) -> None:
    """Print and record bytes and gaps."""
    n_rows, n_tokens = asked.batch, asked.new or N_NEW
    found = [
        measure(seed, precision, asked.device, n_rows, n_tokens)
        for seed in range(asked.seeds)
        for precision in PRECISIONS
    ]
    sampling = " ".join(f"{name}={value}" for name, value in SAMPLING.items())
    print(f"{FAMILY}, {asked.seeds} seeds, {n_rows} sequences of {n_tokens} tokens on {asked.device}")
    print(f"cache {CACHE.label}, {sampling}; gaps in nats\n")
    print(tables(found))
    settings = {"on": asked.device, "n_rows": n_rows, "n_tokens": n_tokens, "cache": CACHE.label}
    record.append(NAME, settings | SAMPLING | {"family": FAMILY, "figures": found})
