"""Memory and seconds of PPO on the five role layouts and of full SFT, measured and predicted.

    python benchmarks/hydra_memory.py [--plot docs/results/pictures/hydra_memory.png] [--record]
    python benchmarks/hydra_memory.py --device cuda --preset 1b --dtype bfloat16

The table of Hydra-RLHF (arXiv:2309.00754) for a random model, by real iterations of the training loop: bytes
by kind, the peak of each phase, seconds per sample at one batch for all, and at one memory for all, with the
largest batch that fits. That memory is the peak of lora_ppo at batch 1 unless --limit-mb gives another. On a
CPU peaks are exact to what kernels use inside; on CUDA they are the allocator's. SFT has the LM loss alone
and sequences as long as a rollout. The prediction (memory_model.py) knows the architecture only; beside it
stand its errors, of the whole peak and of the rest, which is what comes on top of weights, adapters, heads
and optimizer. Megabytes are 10⁶ bytes. The default takes about eight minutes on two cores; --preset tiny is
for a look at the output.
"""

import argparse
import gc
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import command_line
import record
import torch
from hydra_parts.measure import check_backbones, largest_fitting, measure_held
from hydra_parts.plot import draw
from hydra_parts.runs import DTYPES, SFT, Run, make_run
from hydra_parts.setting import PRESETS, Setting, described, job_of
from hydra_parts.tables import (
    BASELINE,
    MB,
    PAPER_NOTE,
    Result,
    equal_memory_table,
    memory_table,
    paper_table,
)
from hydra_parts.timing import measure_seconds
from memory_model import peak_bytes, variant_of

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.layouts import LAYOUTS

NAME = "hydra_memory"
VARIANTS = (*LAYOUTS, SFT)


def predicted_peak(variant: str, setting: Setting, batch: int) -> int:
    return max(peak_bytes(variant_of(variant), job_of(setting, batch)).values())


def build_run(variant: str, setting: Setting) -> Run:
    """The variant, proven to hold the backbones that it should."""
    gc.collect()  # of the variant before
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    run = make_run(variant, setting)
    if variant != SFT:
        check_backbones(variant, run.module.roles)
    return run


def measure(variant: str, setting: Setting, batch: int, n_rounds: int, limit: int) -> Result:
    """One variant at the batch of all, and a layout at the largest batch within the limit too."""
    run = build_run(variant, setting)
    peak_of = cache(lambda n: measure_held(run, n).peak)
    held = measure_held(run, batch)
    seconds = measure_seconds(run, batch, n_rounds)
    predicted = peak_bytes(variant_of(variant), job_of(setting, batch))
    result = Result(variant, batch, held, predicted, seconds)
    if variant == SFT:
        return result
    guess = 1
    while predicted_peak(variant, setting, guess + 1) <= limit:
        guess += 1
    largest = largest_fitting(peak_of, limit, guess)
    result = replace(result, largest_batch=largest)
    if largest == 0:
        return result
    seconds = measure_seconds(run, largest, n_rounds)
    return replace(result, peak_at_largest=peak_of(largest), seconds_at_largest=seconds)


def row_of(result: Result, setting: Setting, limit: int) -> dict:
    return {"setting": described(setting), "limit_bytes": limit, **asdict(result)}


def main() -> None:
    args = parse_arguments()
    setting = setting_of(args)
    results = []
    limit = int(args.limit_mb * MB) if args.limit_mb else measured_limit(setting)
    for variant in args.variants:
        result = measure(variant, setting, args.batch, args.rounds, limit)
        record.append(NAME, row_of(result, setting, limit))
        results.append(result)
        print(f"{variant} measured", flush=True)
    print(f"\nBatch {args.batch} for all\n{memory_table(results)}")
    print(f"\nAt most {limit / MB:,.1f} MB for all\n{equal_memory_table(results)}")
    print(f"\nLlama-7B by the same formula\n{paper_table()}\n{PAPER_NOTE}")
    if args.plot:
        draw(results).savefig(args.plot, dpi=200)


def measured_limit(setting: Setting) -> int:
    """The memory that the baseline fills with one sequence, as in the paper."""
    return measure_held(build_run(BASELINE, setting), 1).peak


def setting_of(args: argparse.Namespace) -> Setting:
    spec = CacheSpec.dense() if args.dense else CacheSpec("random", args.budget, args.interval, 1, 3)
    return Setting(
        size=PRESETS[args.preset],
        prompt_len=args.prompt,
        response_len=args.response,
        rank=args.rank,
        cache=spec,
        dtype=DTYPES[args.dtype],
        device=args.device,
        checkpoints_layers=args.checkpointing,
    )


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--batch", type=int, default=4, help="sequences, the same for all")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--budget", type=int, default=32, help="keys that survive a compaction")
    parser.add_argument("--interval", type=int, default=8, help="tokens between compactions")
    parser.add_argument("--dense", action="store_true", help="a cache that keeps everything")
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers, in all variants")
    parser.add_argument("--limit-mb", type=float, help="memory for all; default: lora_ppo at batch 1")
    parser.add_argument("--rounds", type=int, default=3, help="timed iterations after one that warms up")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
