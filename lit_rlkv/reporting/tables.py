"""Tables of results: cells for the terminal, the report and Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from lit_rlkv.evaluation.estimates import CacheEstimates, IntervalEstimate
from lit_rlkv.evaluation.reward_model import RewardReport
from lit_rlkv.types import EvalRow
from lit_rlkv.units import human_bytes, human_seconds

KL_MEANING = "KL is KL(μ ‖ dense learner) per token, in nats"
ABSENT = "–"
"""Cell of a value that was not measured."""


@dataclass(frozen=True)
class CacheComparison:
    """One cache before and after training; None where it was not evaluated."""

    cache: str
    budget: int | None
    before: EvalRow | None
    after: EvalRow | None
    share_of_dense: float | None
    """Its bytes divided by those of the dense cache; None without a dense evaluation."""

    @property
    def latest(self) -> EvalRow:
        """The evaluation after training, or before if there is none."""
        row = self.after or self.before
        assert row is not None
        return row

    def evaluations(self, names: Sequence[str]) -> list[EvalRow | None]:
        """Return the evaluations of these names, `before` or `after`."""
        return [self.before if name == "before" else self.after for name in names]

    @property
    def replay_gap(self) -> float:
        """Largest replay gap of both evaluations."""
        return max(row.replay_gap for row in (self.before, self.after) if row is not None)


def compare_caches(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> list[CacheComparison]:
    """Return the evaluations paired by cache, in the order of the evaluations.

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
    """Return headings and cells of the evaluation table; columns say before and after if there are both."""
    present = [name for name, rows in (("before", before), ("after", after)) if rows]
    suffixes = [f" {name}" for name in present] if len(present) > 1 else [""]
    headings = ["Cache"]
    headings += [f"Accuracy{suffix}" for suffix in suffixes]
    headings += ["KV bytes", "of dense"]
    headings += [f"KL{suffix}" for suffix in suffixes]
    headings += ["Replay gap"]
    return headings, [_cells(row, present) for row in compare_caches(before, after)]


def learned_cells(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the mean learned rewards; no rows without a reward model."""
    present = [name for name, rows in (("before", before), ("after", after)) if rows]
    rows = [row for row in compare_caches(before, after) if row.latest.learned_reward is not None]
    cells = [[row.cache, *map(_learned, row.evaluations(present))] for row in rows]
    return ["Cache", *(f"Learned reward {name}" for name in present)], cells


def _learned(row: EvalRow | None) -> str:
    return ABSENT if row is None or row.learned_reward is None else f"{row.learned_reward:.2f}"


def stage_cells(stage_seconds: Mapping[str, float | int]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table of times; the last row is the total."""
    rows = [[name, human_seconds(seconds)] for name, seconds in stage_seconds.items()]
    return ["Stage", "Time"], [*rows, ["total", human_seconds(sum(stage_seconds.values()))]]


def summary_table(
    before: Sequence[EvalRow],
    after: Sequence[EvalRow],
    stage_seconds: Mapping[str, float | int],
    reward_model: RewardReport | None = None,
) -> Group:
    """Return all tables for a terminal, without empty ones."""
    tables: list[RenderableType] = []
    if before or after:
        tables += [make_table(*evaluation_cells(before, after)), Text(KL_MEANING, style="dim")]
    headings, cells = learned_cells(before, after)
    if cells:
        tables += [Text(), make_table(headings, cells)]
    if reward_model is not None:
        tables += [Text(), Text(reward_sentence(reward_model))]
    if stage_seconds:
        tables += [Text(), make_table(*stage_cells(stage_seconds))]
    return Group(*tables)


def reward_sentence(report: RewardReport) -> str:
    """Return the quality of the reward model in one sentence."""
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


def _comparison(before: EvalRow | None, after: EvalRow | None, dense_bytes: int | None) -> CacheComparison:
    latest = after or before
    assert latest is not None
    share = latest.kv_bytes / dense_bytes if dense_bytes else None
    return CacheComparison(latest.cache, latest.budget, before, after, share)


def _cells(row: CacheComparison, present: Sequence[str]) -> list[str]:
    evaluations = row.evaluations(present)
    share = ABSENT if row.share_of_dense is None else f"{row.share_of_dense:.0%}"
    return [
        row.cache,
        *(ABSENT if found is None else f"{found.accuracy:.3f}" for found in evaluations),
        human_bytes(row.latest.kv_bytes),
        share,
        *(ABSENT if found is None else f"{found.kl:z.4f}" for found in evaluations),
        f"{row.replay_gap:.1e}",
    ]


def make_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        # Headings may wrap in a narrow terminal, but cells may not.
        widest = max((len(row[number]) for row in rows), default=0)
        side: JustifyMethod = "left" if number == 0 else "right"
        table.add_column(heading, justify=side, no_wrap=number == 0, min_width=widest)
    for row in rows:
        # Text instead of str, so that brackets are not parsed as markup.
        table.add_row(*(Text(cell) for cell in row))
    return table


Scored = tuple[EvalRow, CacheEstimates]


def score_table(scored: Sequence[Scored], level: float) -> Group:
    """Return both tables for a terminal, with notes."""
    return Group(
        make_table(*score_cells(scored)),
        Text(f"[low, high] is the {level:.0%} interval over prompts", style="dim"),
        Text(),
        make_table(*cost_cells([row for row, _ in scored])),
        Text(KL_MEANING, style="dim"),
    )


def score_cells(scored: Sequence[Scored]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of accuracies, pass@k and lengths, with intervals."""
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
    """Return headings and cells of cache bytes, KL, replay gap and, if there are any, learned rewards."""
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
            *([_learned(row)] if has_learned else []),
        ]
        for row in rows
    ]


def _with_interval(estimate: IntervalEstimate, n_decimals: int) -> str:
    value, low, high = (f"{x:.{n_decimals}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str | float | int | None]]) -> str:
    """Return a Markdown table; bars and line breaks in cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return ABSENT
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "&#124;").replace("\n", "<br>")
