"""The gap of quantized keys and values, by the record of their codes; and the KL that rounding costs."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import record
import torch
from replay_parts import evictions
from sampled import gap, sample
from text_table import text_table
from time_limit import TimeLimit
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, replay_logps
from lit_rlkv.kernels.quantization import (
    KV_DTYPES,
    SCALE_GROUP,
    dequantize,
    quantize,
    quantized,
    quantized_bytes,
    record_bytes,
    record_of,
    turned,
)
from lit_rlkv.kvcache import slots
from lit_rlkv.models import quantized_view
from lit_rlkv.models.backbone import head_logits, hidden_states, token_positions
from lit_rlkv.models.key_balance import key_balance
from lit_rlkv.types import Codes, Record

NAME = "quantized_cache"
MODEL = record.ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = CacheSpec("snapkv", 64, 16, 4, 8)
DTYPES = (None, *KV_DTYPES)
N_PROMPT, N_NEW = 16, 112
GROUPS = (1, 16, 64)
"""Codes that share check bits, in the records that are compared."""
ALONE, UNROUNDED = "none", "none, and does not round"
DIM, SLOTS = 128, 1024 + 128
"""Head dimensions, and slots of a row, for the bytes in the table."""
KL_ROWS, KL_TOKENS = 3, 256
OUTLIER = 8
"""Factor of the outlier channels that are planted."""
Coded = tuple[Tensor, Tensor]
"""Codes and scales."""


def run(asked: argparse.Namespace) -> None:
    """Measure each precision, cache and dtype of the codes."""
    asked.model, asked.prompt, asked.new = asked.model or MODEL, asked.prompt or N_PROMPT, asked.new or N_NEW
    torch.set_num_threads(1)
    setting, limit = evictions.setting_of(asked), TimeLimit(asked.minutes)
    done = record.rows(NAME) if asked.record and not asked.again else []
    found = []
    for precision in asked.dtypes:
        of_precision = replace(setting, dtype=evictions.DTYPES[precision])
        prompts = of_precision.prompts(asked.batch)
        for dtype in DTYPES:
            cell = {"block": "replay", "precision": precision, "policy": CACHE.policy, "dtype": dtype}
            cell |= {"rows": asked.batch, "prompt": asked.prompt, "tokens": asked.new}
            cell = {"model": asked.model.stem} | cell
            row = next((row for row in done if row["cell"] == cell), None)
            if row is None and limit.is_over:
                print(f"{precision}, {dtype}: no time left; start again to go on")
                continue
            if row is None:
                spec = replace(CACHE, dtype=dtype)
                row = {"cell": cell, **measure(of_precision.model, prompts, spec, asked.new)}
                record.append(NAME, row)
            found.append(row)
    print(table(found))
    if "float32" in asked.dtypes:
        print(f"\nKL to the exact model\n{kl_table(kl_rows(asked, setting, done, limit))}")


def kl_rows(
    asked: argparse.Namespace, setting: Any, done: list[dict[str, Any]], limit: TimeLimit
) -> list[dict[str, Any]]:
    """Return the KL of each dtype, in float32, of the model as it is and with planted outliers."""
    model, found = replace(setting, dtype=torch.float32).model, []
    n_tokens = min(KL_TOKENS, model.config.max_position_embeddings)
    tokens, exact = setting.tokens(KL_ROWS, n_tokens), None
    for factor in (1, OUTLIER):
        with outliers(model, factor):
            for dtype in KV_DTYPES:
                cell = {"model": asked.model.stem, "block": "kl", "dtype": dtype, "outliers": factor}
                cell |= {"rows": KL_ROWS, "tokens": n_tokens}
                row = next((row for row in done if row["cell"] == cell), None)
                if row is None and not limit.is_over:
                    exact = log_probs(model, tokens) if exact is None else exact
                    row = {"cell": cell, "kl": kl(model, tokens, exact, dtype)}
                    record.append(NAME, row)
                found += [] if row is None else [row]
    return found


def kl_table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each dtype."""
    found = {(row["cell"]["dtype"], row["cell"]["outliers"]): f"{row['kl']:.2g}" for row in rows}
    lines = [[dtype, *(found.get((dtype, factor), "") for factor in (1, OUTLIER))] for dtype in KV_DTYPES]
    return text_table(["dtype", "as it is", "outlier channels"], lines)


def kl(model: PreTrainedModel, tokens: Tensor, exact: Tensor, kv_dtype: str) -> float:
    """Return KL(exact ‖ all keys and values rounded) in nats per token of sequences, from exact log-probs."""
    config, balance = model.config, key_balance(model) if kv_dtype == "int4" else ()
    shape = len(tokens), config.num_hidden_layers, config.num_key_value_heads, 0, tokens.shape[1]
    codes = Codes(kv_dtype, 1, tokens.new_zeros(shape, dtype=torch.uint8), balance)
    rounded = log_probs(model, tokens, codes)
    return F.kl_div(rounded, exact, reduction="sum", log_target=True).item() / tokens.numel()


@torch.no_grad()
def log_probs(model: PreTrainedModel, tokens: Tensor, codes: Codes | None = None) -> Tensor:
    """Return log-probs [row, column, token] of sequences, of a model that rounds by itself or not."""
    is_token = torch.ones_like(tokens, dtype=torch.bool)
    record = replace(Record.dense(is_token), codes=codes)
    hidden = hidden_states(model, tokens, token_positions(is_token), record=record)
    return head_logits(model, hidden).log_softmax(-1)


@contextmanager
@torch.no_grad()
def outliers(model: PreTrainedModel, factor: int) -> Iterator[None]:
    """Within the block, two RoPE pairs of each KV head have keys `factor` times as large, and queries less.

    The model stays the same function. It must have one weight for the keys, without a norm, as Llama has.
    """
    generator = torch.Generator().manual_seed(0)
    factors = []
    for layer in model.model.layers if factor != 1 else ():
        attention = layer.self_attn
        n_heads, dim = attention.k_proj.out_features // attention.head_dim, attention.head_dim
        pairs = torch.stack([torch.randperm(dim // 2, generator=generator)[:2] for _ in range(n_heads)])
        of_key = torch.ones(n_heads, dim).scatter(1, torch.cat([pairs, pairs + dim // 2], dim=1), factor)
        of_query = 1 / of_key.repeat_interleave(attention.q_proj.out_features // dim // n_heads, dim=0)
        factors += [(attention.k_proj.weight, of_key), (attention.q_proj.weight, of_query)]
    factors = [(weight, each.view(-1, 1).to(weight)) for weight, each in factors]
    for weight, each in factors:
        weight.mul_(each)
    try:
        yield
    finally:
        for weight, each in factors:
            weight.div_(each)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each learner: its record, its gap, and the share of numbers unlike the sampler's.

    The record in use is marked. It is smaller than what the slots of a row save up to the length given.
    """
    headings = ["model", "dtype", "record", "bytes", "smaller up to", "mean", "p99", "max", "numbers apart"]
    lines = []
    for row in rows:
        precision, dtype = row["cell"]["precision"], row["cell"]["dtype"]
        for learner, found in row["learners"].items():
            sizes = ["", ""]
            if learner.isdigit():
                n_bytes = 2 * record_bytes(DIM, dtype, int(learner))
                saved = 2 * (quantized_bytes(DIM, None, evictions.DTYPES[precision]))
                saved -= 2 * quantized_bytes(DIM, dtype, evictions.DTYPES[precision])
                sizes = [str(n_bytes), f"{SLOTS * saved // n_bytes:,}"]
            name = f"{int(learner).bit_length()} of {learner}" if learner.isdigit() else learner
            mark = " *" if learner == str(row["group"]) else ""
            gap = [f"{found[size]:.1e}" for size in ("mean", "p99", "max")]
            apart = f"{found['apart']:.1e}" if "apart" in found else ""
            lines.append([precision, dtype or "null", name + mark, *sizes, *gap, apart])
    return text_table(headings, lines)


@contextmanager
def in_place_of(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a module calls `function` by this name."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def measure(model: PreTrainedModel, prompts: Tensor, spec: CacheSpec, n_tokens: int) -> dict[str, Any]:
    """Return the gaps of learners by their record, and the shares of numbers that are not the sampler's.

    There is one for each of `GROUPS`, one that rounds without a record, and one that does not round.
    """
    sampled: list[Coded] = []
    with in_place_of(slots, "quantize", _recording(sampled)):
        rollout = sample(model, prompts, spec, n_tokens)
    found: dict[str, Any] = {
        "n_response_tokens": int(rollout.response_mask.sum()),
        "gap": _gap(model, rollout),
    }
    if spec.dtype is None:
        return found | {"group": None, "learners": {UNROUNDED: found["gap"]}}
    n_layers = model.config.num_hidden_layers
    streams = [  # keys and values of each layer
        [torch.cat(parts, 2) for parts in zip(*sampled[stream :: 2 * n_layers], strict=True)]
        for stream in range(2 * n_layers)
    ]
    codes = rollout.record.codes
    assert codes is not None
    found |= {"record_bytes": rollout.record.part_bytes, "kv_bytes": rollout.kv_bytes, "group": codes.group}
    records = {str(group): _codes(streams, codes, group) for group in GROUPS}
    learners = {name: rollout.with_record(codes=each) for name, each in records.items()}
    learners[ALONE] = rollout.with_record(codes=replace(codes, record=codes.record[..., :0, :]))
    found["learners"] = {}
    for name, learner in learners.items():
        numbers: list[Tensor] = []
        with in_place_of(quantized_view, "quantized", _listening(numbers)):
            gap_of_it = _gap(model, learner)
        apart = [_apart(coded, each, spec.dtype) for coded, each in zip(streams, numbers, strict=True)]
        found["learners"][name] = gap_of_it | {"apart": sum(apart) / len(apart)}
    found["learners"][UNROUNDED] = _gap(model, rollout.with_record(codes=None))
    return found


def _apart(coded: list[Tensor], numbers: Tensor, kv_dtype: str) -> float:
    """Return the share of numbers, turned with int4, that are not those of the codes."""
    expected, numbers = dequantize(*coded, kv_dtype, numbers.dtype), numbers[:, :, : coded[0].shape[2]]
    if kv_dtype != "int4":
        return (expected != numbers).float().mean().item()
    step = coded[1].chunk(2, dim=-1)[0].repeat_interleave(SCALE_GROUP, dim=-1)[..., : numbers.shape[-1]]
    return (turned(expected.float() - numbers.float()).abs() > step / 4).float().mean().item()


def _codes(streams: list[list[Tensor]], codes: Codes, group: int) -> Codes:
    """Return the record of these codes with so many of them in a group; none of the last column is read."""
    parts = [record_of(*each, codes.dtype, group).transpose(2, 3) for each in streams]
    layers = [torch.cat(pair, dim=2) for pair in zip(parts[::2], parts[1::2], strict=True)]
    found = torch.stack(layers, dim=1)
    found = F.pad(found, (0, codes.record.shape[-1] - found.shape[-1]))
    return replace(codes, group=group, record=found)


@torch.no_grad()
def _gap(model: PreTrainedModel, rollout: Rollout) -> dict[str, float]:
    return gap(replay_logps(model, rollout), rollout)


def _recording(calls: list[Coded]) -> Callable[[Tensor, str], Coded]:
    def quantize_and_record(vectors: Tensor, kv_dtype: str) -> Coded:
        calls.append(quantize(vectors, kv_dtype))
        return calls[-1]

    return quantize_and_record


def _listening(numbers: list[Tensor]) -> Callable[..., Tensor]:
    def round_and_record(*arguments: Any) -> Tensor:
        numbers.append(quantized(*arguments))
        return numbers[-1]

    return round_and_record
