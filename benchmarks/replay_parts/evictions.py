"""The gap under an evicting cache, beside rollouts that evict nothing and a learner that sees every key."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import record
import torch
from rollout_parts.setting import PRESETS, Setting
from sampled import gap
from time_limit import TimeLimit
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import replay_logps
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.models.loading import load_causal_lm

NAME = "replay_gap"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TEXTS = sorted((record.ROOT / "docs" / "concepts").glob("*.md"))
"""Prompts of a pretrained model are cut from them; any English text would do."""


@dataclass(frozen=True)
class Pretrained(Setting):
    """The setting of a pretrained model: its weights and prompts of real text."""

    path: Path = Path()
    n_prompt: int = 0

    def prompts(self, n: int) -> Tensor:
        return self.tokens(n, self.n_prompt or self.shape.prompt)

    def plain_model(self) -> PreTrainedModel:
        assert self.dtype is not None
        return load_causal_lm(self.path, self.dtype).to(self.device).eval()

    def tokens(self, n: int, length: int) -> Tensor:
        text = "\n".join(file.read_text(encoding="utf-8") for file in TEXTS)
        ids = AutoTokenizer.from_pretrained(self.path)(text, return_tensors="pt").input_ids[0]
        assert len(ids) >= n * length, f"docs/concepts has {len(ids)} tokens, not {n} prompts of {length}"
        return ids[: n * length].view(n, length).to(self.device)


@cache
def no_eviction(setting: Setting) -> dict[str, float]:
    """Return statistics of the gap where all keys are kept."""
    rollout = setting.roll_out(setting.prompts(setting.batch), CacheSpec.dense())
    return gap(replay_logps(setting.model, rollout), rollout)


def measure(setting: Setting, spec: CacheSpec, kernels: str) -> dict[str, Any]:
    """Return the row of one dtype and policy: statistics of the gaps."""
    with use_kernels(kernels), torch.no_grad():
        control = no_eviction(setting)
        print(f"{setting.dtype}, without evictions: gap mean {control['mean']:.1e} nats", flush=True)
        rollout = setting.roll_out(setting.prompts(setting.batch), spec)
        return {
            "n_tokens": int(rollout.response_mask.sum()),
            "gap": gap(replay_logps(setting.model, rollout), rollout),
            "no_eviction": control,
            "dense_learner": gap(replay_logps(setting.model, rollout, shadow=False), rollout),
        }


def folder_of(path: Path) -> Path:
    """Return a folder that transformers loads: the path itself, or the conversion of a GGUF file."""
    if path.suffix != ".gguf":
        return path
    return converted_gguf(path, Path(tempfile.gettempdir()) / "lit_rlkv_converted")


def show(setting: Pretrained, specs: Sequence[CacheSpec]) -> None:
    """Print how the model goes on with the first prompt, greedily, under each cache."""
    tokenizer = AutoTokenizer.from_pretrained(setting.path)
    prompts = setting.prompts(1)
    print(f"prompt      ... {tokenizer.decode(prompts[0])[-200:]!r}")
    for spec in (CacheSpec.dense(), *specs):
        rollout = setting.roll_out(prompts, spec, temperature=0.0)
        print(f"{spec.label:12}{tokenizer.decode(rollout.input_ids[0, prompts.shape[1] :])!r}", flush=True)


def setting_of(arguments: argparse.Namespace) -> Setting:
    """Return the preset's setting, or that of the pretrained model that was asked for."""
    setting = Setting(
        arguments.preset, "h2o", arguments.batch, arguments.new, 1, torch.device(arguments.device)
    )
    if arguments.model is None:
        return setting
    return Pretrained(**vars(setting), path=folder_of(arguments.model), n_prompt=arguments.prompt)


def run(arguments: argparse.Namespace) -> None:
    """Measure each dtype and policy."""
    arguments.budget = arguments.budget or PRESETS[arguments.preset].budgets[0]
    arguments.new = arguments.new or PRESETS[arguments.preset].new // 4
    setting = setting_of(arguments)
    specs = [replace(setting.cache(arguments.budget), policy=name) for name in arguments.policies]
    settings = {name: replace(setting, dtype=DTYPES[name]) for name in arguments.dtypes}
    if arguments.show:
        show(settings[arguments.dtypes[0]], specs)
        return
    limit = TimeLimit(arguments.minutes)
    for dtype, spec in product(settings, specs):
        key = {
            "model": arguments.preset if arguments.model is None else arguments.model.stem,
            "dtype": dtype,
            "kernels": arguments.kernels,
            "policy": spec.policy,
            "budget": arguments.budget,
            "batch": arguments.batch,
            "prompt": arguments.prompt or setting.shape.prompt,
            "new": arguments.new,
        }
        row = record.find(NAME, **key) if arguments.record and not arguments.again else None
        if row is None and limit.is_over:
            print(f"{key['model']}, {dtype}, {spec.policy}: no time left; start again to go on")
            continue
        if row is None:
            row = key | measure(settings[dtype], spec, arguments.kernels)
            record.append(NAME, row)
        print_row(row)


def print_row(row: dict[str, Any]) -> None:
    gap = row["gap"]
    print(
        f"{row['model']}, {row['dtype']}, {row['policy']} at budget {row['budget']}: "
        f"gap mean {gap['mean']:.1e}, p99 {gap['p99']:.1e}, max {gap['max']:.1e} nats "
        f"over {row['n_tokens']:,} tokens; "
        f"without evictions mean {row['no_eviction']['mean']:.1e}; "
        f"a dense learner's mean {row['dense_learner']['mean']:.1e}",
        flush=True,
    )
