"""The table that ends a run: what each cache scored and cost, before and after, and where the time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from lit_rlkv.evaluation.reward_model import RewardReport
from lit_rlkv.types import EvalRow
from lit_rlkv.units import human_bytes, human_seconds

KL_MEANING = "KL is KL(μ ‖ dense learner) per token, in nats"
ABSENT = "–"
"""What a cell shows where nothing was measured."""


@dataclass(frozen=True)
class Comparison:
    """One cache before and after training; None where it was not evaluated."""

    cache: str
    budget: int | None
    before: EvalRow | None
    after: EvalRow | None
    share_of_dense: float | None
    """Its bytes over those of the dense cache; None without a dense evaluation."""

    @property
    def latest(self) -> EvalRow:
        """The evaluation after training, or else the one before."""
        row = self.after or self.before
        assert row is not None
        return row

    @property
    def replay_gap(self) -> float:
        """The larger of both evaluations: one broken replay is enough to know of."""
        return max(row.replay_gap for row in (self.before, self.after) if row is not None)


def compare(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> list[Comparison]:
    """Rows of the same cache side by side, in the order of the evaluations.

    Raises:
        ValueError: one evaluation lists a cache twice.
    """
    earlier, later = _by_cache(before), _by_cache(after)
    dense = [row.kv_bytes for row in (*after, *before) if row.budget is None and row.kv_bytes > 0]
    caches = list(dict.fromkeys([*later, *earlier]))
    return [_comparison(earlier.get(name), later.get(name), dense[0] if dense else None) for name in caches]


def evaluation_cells(
    before: Sequence[EvalRow], after: Sequence[EvalRow]
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the evaluation table; one that happened only once has no before and after."""
    moments = [("before", before), ("after", after)]
    present = [name for name, rows in moments if rows]
    suffixes = [f" {name}" for name in present] if len(present) > 1 else [""]
    headings = ["Cache"]
    headings += [f"Accuracy{suffix}" for suffix in suffixes]
    headings += ["KV bytes", "of dense"]
    headings += [f"KL{suffix}" for suffix in suffixes]
    headings += ["Replay gap"]
    return headings, [_cells(row, present) for row in compare(before, after)]


def learned_cells(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the reward model's mean score of the same responses; no rows without one."""
    moments = {name: rows for name, rows in (("before", before), ("after", after)) if rows}
    rows = [row for row in compare(before, after) if row.latest.learned_reward is not None]
    cells = [
        [row.cache, *(_learned(row.before if name == "before" else row.after) for name in moments)]
        for row in rows
    ]
    return ["Cache", *(f"Learned reward {name}" for name in moments)], cells


def _learned(row: EvalRow | None) -> str:
    return ABSENT if row is None or row.learned_reward is None else f"{row.learned_reward:.2f}"


def stage_cells(stage_seconds: Mapping[str, float | int]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table of times; the last row is their sum."""
    rows = [[name, human_seconds(seconds)] for name, seconds in stage_seconds.items()]
    return ["Stage", "Time"], [*rows, ["total", human_seconds(sum(stage_seconds.values()))]]


def summary_table(
    before: Sequence[EvalRow],
    after: Sequence[EvalRow],
    stage_seconds: Mapping[str, float | int],
    reward_model: RewardReport | None = None,
) -> Group:
    """Both tables for a terminal; one that would be empty is left out."""
    tables: list[RenderableType] = []
    if before or after:
        tables += [table_of(*evaluation_cells(before, after)), Text(KL_MEANING, style="dim")]
    headings, cells = learned_cells(before, after)
    if cells:
        tables += [Text(), table_of(headings, cells)]
    if reward_model is not None:
        tables += [Text(), Text(reward_sentence(reward_model))]
    if stage_seconds:
        tables += [Text(), table_of(*stage_cells(stage_seconds))]
    return Group(*tables)


def reward_sentence(report: RewardReport) -> str:
    """What the reward model is worth, in one line."""
    return (
        f"Reward model on {report.n_pairs} held-out pairs: {report.pair_accuracy:.1%} ranked right, "
        f"margin {report.margin_mean:.2f} ± {report.margin_std:.2f}, "
        f"calibration error {report.calibration_error:.3f}"
    )


def _by_cache(rows: Sequence[EvalRow]) -> dict[str, EvalRow]:
    named = {row.cache: row for row in rows}
    if len(named) < len(rows):
        caches = ", ".join(row.cache for row in rows)
        raise ValueError(f"an evaluation lists a cache twice ({caches}); give each its own name")
    return named


def _comparison(before: EvalRow | None, after: EvalRow | None, dense_bytes: int | None) -> Comparison:
    latest = after or before
    assert latest is not None
    share = latest.kv_bytes / dense_bytes if dense_bytes else None
    return Comparison(latest.cache, latest.budget, before, after, share)


def _cells(row: Comparison, present: Sequence[str]) -> list[str]:
    moments = [row.before if name == "before" else row.after for name in present]
    share = ABSENT if row.share_of_dense is None else f"{row.share_of_dense:.0%}"
    return [
        row.cache,
        *(ABSENT if moment is None else f"{moment.accuracy:.3f}" for moment in moments),
        human_bytes(row.latest.kv_bytes),
        share,
        *(ABSENT if moment is None else f"{moment.kl:z.4f}" for moment in moments),
        f"{row.replay_gap:.1e}",
    ]


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        # Headings may wrap in a narrow terminal; a figure must not lose its unit to the next line.
        widest = max((len(row[number]) for row in rows), default=0)
        side: JustifyMethod = "left" if number == 0 else "right"
        table.add_column(heading, justify=side, no_wrap=number == 0, min_width=widest)
    for row in rows:
        # Text, not str: a name in brackets is no markup
        table.add_row(*(Text(cell) for cell in row))
    return table
