"""The gap of quantized keys and values, with and without the record of their codes."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import record
import torch
from replay_parts import evictions
from sampled import gap, sample
from text_table import text_table
from time_limit import TimeLimit
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, replay_logps
from lit_rlkv.kernels.quantization import KV_DTYPES, dequantize, quantize, quantized
from lit_rlkv.kvcache import slots
from lit_rlkv.models import quantized_view

NAME = "quantized_cache"
MODEL = record.ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHES = {"dense": CacheSpec.dense(), "snapkv": CacheSpec("snapkv", 64, 16, 4, 8)}
DTYPES = (None, *KV_DTYPES)
N_PROMPT, N_NEW = 128, 48
LEARNERS = ("gap", "by_itself", "unrounded")
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
        for policy, dtype in product(CACHES, DTYPES):
            cell = {"block": "replay", "precision": precision, "policy": policy, "dtype": dtype}
            cell |= {"rows": asked.batch, "prompt": asked.prompt, "tokens": asked.new}
            cell = {"model": asked.model.stem} | cell
            row = next((row for row in done if row["cell"] == cell), None)
            if row is None and limit.is_over:
                print(f"{precision}, {policy}, {dtype}: no time left; start again to go on")
                continue
            if row is None:
                spec = replace(CACHES[policy], dtype=dtype)
                row = {"cell": cell, **measure(of_precision.model, prompts, spec, asked.new)}
                record.append(NAME, row)
            found.append(row)
    print(table(found))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each row: gaps of the learners, and shares of numbers that are not the sampler's."""
    headings = [
        *("model", "cache", "dtype", "gap mean", "gap max", "numbers apart"),
        *("by itself: mean", "max", "numbers apart", "not rounding: mean", "max"),
    ]
    lines = []
    for row in rows:
        cell = row["cell"]
        line = [cell["precision"], cell["policy"], cell["dtype"] or "16 bit"]
        for learner in LEARNERS:
            line += [f"{row[learner][name]:.1e}" if learner in row else "" for name in ("mean", "max")]
            if learner != "unrounded":
                line.append(f"{row[f'{learner}_moved']:.1e}" if cell["dtype"] else "")
        lines.append(line)
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
    """Return the gaps of three learners, and the shares of codes and scales that are not the sampler's.

    `gap` is of the learner with the record of the codes, `by_itself` of one that rounds without it, and
    `unrounded` of one that does not round.
    """
    sampled: list[Coded] = []
    with in_place_of(slots, "quantize", _recording(sampled)):
        rollout = sample(model, prompts, spec, n_tokens)
    found: dict[str, Any] = {"n_response_tokens": int(rollout.response_mask.sum())}
    if spec.dtype is None:
        return found | {"gap": _gap(model, rollout)}
    n_streams = 2 * model.config.num_hidden_layers  # keys and values of each layer
    coded = [zip(*sampled[stream::n_streams], strict=True) for stream in range(n_streams)]
    streams = [
        dequantize(*(torch.cat(parts, 2) for parts in each), spec.dtype, model.dtype) for each in coded
    ]
    found["record_bytes"], found["kv_bytes"] = rollout.record.part_bytes, rollout.kv_bytes
    codes = rollout.record.codes
    assert codes is not None
    by_itself = rollout.with_record(codes=replace(codes, record=codes.record[..., :0, :]))
    for name, learner in {"gap": rollout, "by_itself": by_itself}.items():
        numbers: list[Tensor] = []
        with in_place_of(quantized_view, "quantized", _listening(numbers)):
            found[name] = _gap(model, learner)
        moved = [(a != b).float().mean().item() for a, b in zip(streams, numbers, strict=True)]
        found[f"{name}_moved"] = sum(moved) / len(moved)
        found[f"{name}_moved_by_layer"] = [
            round(sum(moved[i : i + 2]) / 2, 7) for i in range(0, n_streams, 2)
        ]
    return found | {"unrounded": _gap(model, rollout.with_record(codes=None))}


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
