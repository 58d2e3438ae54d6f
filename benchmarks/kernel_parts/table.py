"""Measurements of the kernels, as text and as rows of the record."""

from collections.abc import Sequence
from dataclasses import asdict

from kernel_parts.accuracy import LIMIT
from kernel_parts.case import ArmResult, CaseResult, Setting
from kernel_parts.timing import Ceilings
from text_table import text_table

MB = 1e6
HEADINGS = (
    "case",
    "way",
    "ms",
    "p10",
    "p90",
    "/ first way",
    "GB/s",
    "TFLOP/s",
    "of ceiling",
    "first call s",
    "peak MB",
)


def case_table(results: Sequence[CaseResult]) -> str:
    """One line for each way of each case; what failed, and the error found, below."""
    rows, notes = [], []
    for result in results:
        for number, arm in enumerate(result.arms):
            rows.append([result.label if number == 0 else "", *_cells(result, arm)])
        notes.extend(
            f"  {result.label}: {failed.name} cannot run: {failed.reason}" for failed in result.failed
        )
    worst = max(result.excess_error for result in results)
    bound = {result.bound for result in results}
    lines = [
        f"{results[0].op}: largest error {worst:.2f} where {LIMIT} is refused; "
        f"ceiling: {' and '.join(sorted(bound))}",
        text_table(HEADINGS, rows, n_left=2),
        *notes,
        *_facts(results),
    ]
    return "\n".join(lines)


def _cells(result: CaseResult, arm: ArmResult) -> list[str]:
    seconds, work = arm.seconds, arm.work
    rates = ["", ""]
    if work is not None:
        gb_per_s, tflops = work.n_bytes / seconds.median / 1e9, work.n_flops / seconds.median / 1e12
        rates = [f"{gb_per_s:,.1f}", f"{tflops:,.2f}"]
    share = "" if arm.share_of_ceiling is None else f"{arm.share_of_ceiling:.1%}"
    ms = [f"{1e3 * value:,.4f}" for value in (seconds.median, seconds.p10, seconds.p90)]
    return [arm.name, *ms, f"{arm.over_ours:.2f}", *rates, share, f"{arm.first_s:.2f}", mb(arm.peak_bytes)]


def _facts(results: Sequence[CaseResult]) -> list[str]:
    """Return the notes below a table of times."""
    facts = []
    for result in results:
        if "visible_share" in result.figures:
            per_token = result.arms[0].peak_bytes / int(result.sizes["seq"])
            facts.append(
                f"  {result.label}: queries see {result.figures['visible_share']:.1%} of the dense pairs; "
                f"peak {per_token:,.0f} bytes a token"
            )
        if "interval" in result.sizes and "slots" in result.sizes:
            share = decode_share(result)
            facts.append(f"  {result.label}: {share:.1%} of the decode attention between two compactions")
    return facts


def decode_share(result: CaseResult) -> float:
    """Time of a compaction's part over that of `interval` steps of decode attention, of one layer."""
    decode = next(arm for arm in result.arms if arm.name == "decode attention")
    return result.arms[0].seconds.median / (decode.seconds.median * int(result.sizes["interval"]))


def record_row(result: CaseResult, setting: Setting, ceilings: Ceilings) -> dict:
    """One line of the record."""
    return {
        **asdict(result),
        "device_type": setting.device,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "timed": setting.timed_kernels,
        "n_rounds": setting.n_rounds,
        "ceilings": asdict(ceilings),
    }


def mb(n_bytes: float) -> str:
    return f"{n_bytes / MB:,.1f}" if n_bytes < 100 * MB else f"{n_bytes / MB:,.0f}"
