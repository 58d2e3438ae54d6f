"""Replay gap: log-probs of a rollout as the learner replays them, minus the sampler's, in 16 and in 32 bit.

    python benchmarks/replay_gap.py [--preset 1.5b|tiny] [--dtypes bfloat16 float32] [--record]
    python benchmarks/replay_gap.py --model models/gemma-3-270m-q4_k_m.gguf --dtypes float32 --budget 256 \
        --policies h2o snapkv --batch 2 --prompt 1792 --new 256 [--show]

A model of random weights, or a pretrained one (GGUF file or checkpoint folder) on text of this repository,
samples under an evicting cache; one forward then replays the rollout. Printed are mean, 99th percentile and
largest value of |replayed − sampled| over all response tokens, in nats; the mean of the same for a rollout
that evicts nothing, which is rounding alone; and, as a control, for a learner that sees every key. `--record`
keeps a row for each dtype and policy; started again with it, it measures what this machine and version of the
package have no row for. `--show` prints instead how a pretrained model goes on with the first prompt,
greedily, with all keys and under each policy.
"""

import allocator  # noqa: F401  # isort: skip  (before torch)

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import command_line
import record
import torch
from rollout_parts.setting import PRESETS, Setting
from sampled import gap
from time_limit import TimeLimit
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import UNTRAINED
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
        rollout = setting.roll_out(setting.prompts(setting.batch), spec)
        return {
            "n_tokens": int(rollout.response_mask.sum()),
            "gap": gap(replay_logps(setting.model, rollout), rollout),
            "no_eviction": no_eviction(setting),
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


def parse() -> argparse.Namespace:
    parser = command_line.Parser(__doc__, NAME)
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--preset", choices=PRESETS, default="1.5b" if has_cuda else "tiny")
    parser.add_argument(
        "--model", type=Path, help="GGUF file or checkpoint folder, instead of random weights"
    )
    parser.add_argument("--policies", nargs="+", choices=UNTRAINED, default=["h2o"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kernels", default="auto", help="auto, reference or triton")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a pretrained model's prompts")
    parser.add_argument("--show", action="store_true", help="print texts, and measure nothing")
    parser.add_argument("--new", type=int, help="tokens of a response; default: a quarter of the preset's")
    command_line.add_restart_options(parser)
    arguments = parser.parse_args()
    arguments.budget = arguments.budget or PRESETS[arguments.preset].budgets[0]
    arguments.new = arguments.new or PRESETS[arguments.preset].new // 4
    return arguments


def main() -> None:
    arguments = parse()
    setting = Setting(
        arguments.preset, "h2o", arguments.batch, arguments.new, 1, torch.device(arguments.device)
    )
    if arguments.model is not None:
        setting = Pretrained(**vars(setting), path=folder_of(arguments.model), n_prompt=arguments.prompt)
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


if __name__ == "__main__":
    main()
