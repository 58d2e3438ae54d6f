"""The run behind kernels.py: ceilings, then every case of every operation, then tables and picture."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

import record
from kernel_parts import case
from kernel_parts import decode as kernel_decode
from kernel_parts import evict as kernel_evict
from kernel_parts import sampling as kernel_sampling
from kernel_parts import scores as kernel_scores
from kernel_parts import shadow as kernel_shadow
from kernel_parts import tokens as kernel_tokens
from kernel_parts.case import Builders, CaseResult, Refusal, Setting, release, try_to_measure
from kernel_parts.table import case_table, record_row
from kernel_parts.timing import Ceilings, ceilings
from time_limit import TimeLimit

NAME = "kernels"
CASES: dict[str, Callable[[Setting], Builders]] = {
    "decode_attention": kernel_decode.cases,
    "evict": kernel_evict.cases,
    "slot_scores": kernel_scores.cases,
    "shadow_attention": kernel_shadow.cases,
    "token_logps": kernel_tokens.cases,
    "token_sampling": kernel_sampling.cases,
}


def run(args: argparse.Namespace) -> list[CaseResult]:
    """Everything asked for; what was measured is kept case by case, and printed as tables at the end.

    Raises:
        SystemExit: cases were refused; the others have been measured.
    """
    setting, limit = setting_of(args), TimeLimit(args.minutes)
    limits = ceilings(setting.device)
    release(setting.device)
    results, refused = [], []
    for op in args.ops:
        for label, build in CASES[op](setting):
            if args.only not in label or is_done(args, NAME, op, label):
                continue
            if limit.is_over:
                print(f"{op}, {label}: no time left; start again to go on", flush=True)
                continue
            result = try_to_measure(build, setting, limits)
            release(setting.device)
            if isinstance(result, Refusal):
                row = {"op": op, "label": label, "device_type": args.device, **asdict(result)}
                print(f"{op}, {label}: {result.in_short}", flush=True)
                if not result.out_of_memory:
                    refused.append(f"{op}, {label}: {result.in_short}")
            else:
                row = record_row(result, setting, limits)
                results.append(result)
                print(f"{op}, {result.in_short}", flush=True)
            record.append(NAME, row)
    print("\n" + report(results, setting, limits))
    if refused:
        sys.exit("\n".join(refused))
    return results


def is_done(args: argparse.Namespace, name: str, op: str, label: str) -> bool:
    """True, and said, if the record has this case and it is not to be measured again."""
    if not args.record or args.again:
        return False
    if not case.is_done(record.find(name, op=op, label=label, device_type=args.device)):
        return False
    print(f"{op}, {label}: in the record already", flush=True)
    return True


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
