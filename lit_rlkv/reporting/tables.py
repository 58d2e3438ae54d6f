"""Tables of results: cells for the terminal, the report and Markdown."""

from collections.abc import Mapping, Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from lit_rlkv.evaluation.intervals import accuracy_interval
from lit_rlkv.evaluation.results import CacheEstimates, EvalRow, IntervalEstimate, RewardReport
from lit_rlkv.units import human_bytes, human_seconds

KL_MEANING = "KL is KL(μ ‖ dense learner) per token, in nats: an estimate, negative at times"
ABSENT = "–"
"""Cell of a value that was not measured."""


Cells = tuple[list[str], list[list[str]]]
"""Headings and rows of a table."""


def compare_caches(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> dict[str, list[EvalRow | None]]:
    """Return the rows of each cache, one for each evaluation that is not empty; None where it has no row.

    Raises:
        ValueError: one evaluation lists a cache twice.
    """
    for rows in (before, after):
        if len({row.cache for row in rows}) < len(rows):
            caches = ", ".join(row.cache for row in rows)
            raise ValueError(f"an evaluation lists a cache twice ({caches}); give each its own name")
    named = [{row.cache: row for row in rows} for rows in (before, after) if rows]
    return {row.cache: [rows.get(row.cache) for rows in named] for row in (*after, *before)}


def _names(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> list[str]:
    return [name for name, rows in (("before", before), ("after", after)) if rows]


def evaluation_cells(
    before: Sequence[EvalRow], after: Sequence[EvalRow], *, with_intervals: bool = False
) -> Cells:
    """Return the evaluation table; columns say before and after if there are both.

    Args:
        with_intervals: accuracies with their 95% Wilson intervals, which are too wide for a terminal.
    """
    accuracy_of = accuracy_cell if with_intervals else _accuracy
    names = _names(before, after)
    suffixes = [f" {name}" for name in names] if len(names) > 1 else [""]
    headings = ["Cache", *(f"Accuracy{suffix}" for suffix in suffixes), "KV bytes", "of dense"]
    headings += [*(f"KL{suffix}" for suffix in suffixes), "Replay gap"]
    cells = []
    for cache, rows in compare_caches(before, after).items():
        measured = [row for row in rows if row is not None]
        cells.append(
            [
                cache,
                *(ABSENT if row is None else accuracy_of(row) for row in rows),
                human_bytes(measured[-1].kv_bytes),
                share_of_dense(measured[-1], [*after, *before]),
                *(ABSENT if row is None else f"{row.kl:z.4f}" for row in rows),
                f"{max(row.replay_gap for row in measured):.1e}",
            ]
        )
    return headings, cells


def learned_cells(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> Cells:
    """Return the table of mean learned rewards; it has no rows without a reward model."""
    found = {cache: [_learned(row) for row in rows] for cache, rows in compare_caches(before, after).items()}
    headings = ["Cache", *(f"Learned reward {name}" for name in _names(before, after))]
    return headings, [[cache, *cells] for cache, cells in found.items() if set(cells) != {ABSENT}]


def _learned(row: EvalRow | None) -> str:
    return ABSENT if row is None or row.learned_reward is None else f"{row.learned_reward:.2f}"


def _accuracy(row: EvalRow) -> str:
    return f"{row.accuracy:.3f}"


def accuracy_cell(row: EvalRow) -> str:
    """Return an accuracy with its 95% Wilson interval if it has one, such as 81.0% [77.4, 84.2]."""
    interval = accuracy_interval(row)
    shown = f" [{100 * interval.low:.1f}, {100 * interval.high:.1f}]" if interval else ""
    return percent(row.accuracy) + shown


def percent(share: float | int) -> str:
    """Return a share as a percentage, such as 81.0%."""
    return f"{share:.1%}"


def share_of_dense(row: EvalRow, rows: Sequence[EvalRow]) -> str:
    """Return the cache bytes as a share of those of the first dense cache among the rows."""
    dense = next((other.kv_bytes for other in rows if other.budget is None and other.kv_bytes > 0), None)
    return f"{row.kv_bytes / dense:.0%}" if dense else ABSENT


def stage_cells(stage_seconds: Mapping[str, float | int]) -> Cells:
    """Return the table of times; the last row is the total."""
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
    if reward_model is not None and cells:  # a run that a verifier rewards does not use its reward head
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


def make_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        # Headings may wrap in a narrow terminal, but cells may not.
        widest = max((len(row[number]) for row in rows), default=0)
        side: JustifyMethod = "left" if number == 0 else "right"
        table.add_column(Text(heading), justify=side, no_wrap=number == 0, min_width=widest)
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


def score_cells(scored: Sequence[Scored]) -> Cells:
    """Return the table of accuracies, pass@k and lengths, with intervals."""
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


def cost_cells(rows: Sequence[EvalRow]) -> Cells:
    """Return the table of cache bytes, KL, replay gap and, if there are any, learned rewards."""
    has_learned = any(row.learned_reward is not None for row in rows)
    headings = ["Cache", "KV bytes", "of dense", "KL", "Replay gap"]
    headings += ["Learned reward"] if has_learned else []
    return headings, [
        [
            row.cache,
            human_bytes(row.kv_bytes),
            share_of_dense(row, rows),
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
