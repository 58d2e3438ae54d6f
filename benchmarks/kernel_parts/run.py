"""The run behind kernels.py: ceilings, then every case of every operation, then tables and picture."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import record
from kernel_parts import decode as kernel_decode
from kernel_parts import evict as kernel_evict
from kernel_parts import sampling as kernel_sampling
from kernel_parts import scores as kernel_scores
from kernel_parts import shadow as kernel_shadow
from kernel_parts import shared as kernel_shared
from kernel_parts import tokens as kernel_tokens
from kernel_parts.case import Builders, CaseResult, Setting, measure_all, release
from kernel_parts.table import case_table, record_row
from kernel_parts.timing import Ceilings, ceilings

NAME = "kernels"
CASES: dict[str, Callable[[Setting], Builders]] = {
    "decode_attention": kernel_decode.cases,
    "evict": kernel_evict.cases,
    "slot_scores": kernel_scores.cases,
    "shadow_attention": kernel_shadow.cases,
    "shared_prompt": kernel_shared.cases,
    "token_logps": kernel_tokens.cases,
    "token_sampling": kernel_sampling.cases,
}


def run(args: argparse.Namespace) -> list[CaseResult]:
    """Everything asked for; what was measured is kept case by case, and printed as tables at the end.

    Raises:
        SystemExit: cases were refused; the others have been measured.
    """
    setting = setting_of(args)
    limits = ceilings(setting.device)
    release(setting.device)
    todo = (
        (f"{op}, {label}", {"op": op, "label": label, "device_type": args.device}, build)
        for op in args.ops
        for label, build in CASES[op](setting)
        if args.only in label
    )
    results, refused = measure_all(
        args, NAME, todo, setting, limits, partial(record_row, setting=setting, ceilings=limits)
    )
    print("\n" + report(results, setting, limits))
    if refused:
        sys.exit("\n".join(refused))
    return results


def report(results: list[CaseResult], setting: Setting, limits: Ceilings) -> str:
    """Ceilings and a table for each operation."""
    precision = str(setting.dtype).removeprefix("torch.")
    parts = [
        f"{record.provenance()['device']}, {precision}, {setting.n_rounds} rounds: copies reach "
        f"{limits.copy_gb_per_s:,.1f} GB/s, products {limits.matmul_tflops:,.2f} TFLOP/s"
    ]
    if setting.timed_kernels != "triton":
        parts.append(
            "No GPU: the Triton kernels were interpreted and found right; TIMED IS THE PLAIN DEFINITION, "
            "not the kernels."
        )
    for op in CASES:
        of_op = [result for result in results if result.op == op]
        if of_op:
            parts.append(case_table(of_op))
    return "\n\n".join(parts)


def setting_of(args: argparse.Namespace) -> Setting:
    return Setting(args.device, args.size == "toy", args.rounds, times_flex=not args.skip_flex)
