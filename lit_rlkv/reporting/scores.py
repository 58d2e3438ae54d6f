"""The tables that end an evaluation: what each cache scored, with intervals, and what it cost."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from lit_rlkv.diagnostics.bootstrap import Estimate
from lit_rlkv.evaluation.estimates import Estimates
from lit_rlkv.reporting.summary import ABSENT, KL_MEANING, table_of
from lit_rlkv.types import EvalRow
from lit_rlkv.units import human_bytes

Scored = tuple[EvalRow, Estimates]


def score_table(scored: Sequence[Scored], level: float) -> Group:
    """Both tables for a terminal, and what their figures are."""
    return Group(
        table_of(*score_cells(scored)),
        Text(f"[low, high] is the {level:.0%} interval over prompts", style="dim"),
        Text(),
        table_of(*cost_cells([row for row, _ in scored])),
        Text(KL_MEANING, style="dim"),
    )


def score_cells(scored: Sequence[Scored]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of what was scored, each with its interval."""
    ks = list(scored[0][1].pass_at_k) if scored else []
    headings = ["Cache", "Accuracy", *(f"pass@{k}" for k in ks), "Tokens"]
    return headings, [
        [
            row.cache,
            _with_interval(found.accuracy, 3),
            *(_with_interval(estimate, 3) for estimate in found.pass_at_k.values()),
            _with_interval(found.mean_length, 1),
        ]
        for row, found in scored
    ]


def cost_cells(rows: Sequence[EvalRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of cost and distance from dense; the learned reward where there is one."""
    dense_bytes = next((row.kv_bytes for row in rows if row.budget is None), None)
    has_learned = any(row.learned_reward is not None for row in rows)
    headings = ["Cache", "KV bytes", "of dense", "KL", "Replay gap"]
    headings += ["Learned reward"] if has_learned else []
    return headings, [
        [
            row.cache,
            human_bytes(row.kv_bytes),
            f"{row.kv_bytes / dense_bytes:.0%}" if dense_bytes else ABSENT,
            f"{row.kl:z.4f}",
            f"{row.replay_gap:.1e}",
            *([ABSENT if row.learned_reward is None else f"{row.learned_reward:.2f}"] if has_learned else []),
        ]
        for row in rows
    ]


def _with_interval(estimate: Estimate, n_decimals: int) -> str:
    value, low, high = (f"{x:.{n_decimals}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"
