"""The gap of quantized keys and values, by the record of their codes."""

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
    dequantize,
    quantize,
    quantized,
    quantized_bytes,
    record_bytes,
    record_of,
)
from lit_rlkv.kvcache import slots
from lit_rlkv.models import quantized_view
from lit_rlkv.types import Codes

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
    records = {str(group): _codes(streams, spec.dtype, group, codes.record.shape[-1]) for group in GROUPS}
    learners = {name: rollout.with_record(codes=each) for name, each in records.items()}
    learners[ALONE] = rollout.with_record(codes=replace(codes, record=codes.record[..., :0, :]))
    found["learners"] = {}
    for name, learner in learners.items():
        numbers: list[Tensor] = []
        with in_place_of(quantized_view, "quantized", _listening(numbers)):
            gap_of_it = _gap(model, learner)
        apart = [
            (dequantize(*coded, spec.dtype, each.dtype) != each[:, :, : coded[0].shape[2]])
            .float()
            .mean()
            .item()
            for coded, each in zip(streams, numbers, strict=True)
        ]
        found["learners"][name] = gap_of_it | {"apart": sum(apart) / len(apart)}
    found["learners"][UNROUNDED] = _gap(model, rollout.with_record(codes=None))
    return found


def _codes(streams: list[list[Tensor]], kv_dtype: str, group: int, n_columns: int) -> Codes:
    """Return the record of these codes with so many of them in a group; none of the last column is read."""
    parts = [record_of(*each, kv_dtype, group).transpose(2, 3) for each in streams]
    layers = [torch.cat(pair, dim=2) for pair in zip(parts[::2], parts[1::2], strict=True)]
    found = torch.stack(layers, dim=1)
    return Codes(kv_dtype, group, F.pad(found, (0, n_columns - found.shape[-1])))


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
