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


def evaluation_cells(
    evaluations: Mapping[str, Sequence[EvalRow]], *, name: str = "When", with_intervals: bool = False
) -> Cells:
    """Return a table of evaluations: the rows of one cache stand together, in the order of the evaluations.

    Args:
        evaluations: rows by the name of the evaluation, such as before and after.
        name: heading of the names.
        with_intervals: accuracies with their 95% Wilson intervals, which are too wide for a terminal.
    """
    found = [
        {
            "Cache": row.cache,
            name: evaluation,
            **_quality(row, with_intervals=with_intervals),
            **_costs(row, rows),
        }
        for evaluation, rows in evaluations.items()
        for row in rows
    ]
    caches = list(dict.fromkeys(cells["Cache"] for cells in found))
    return table_of(sorted(found, key=lambda cells: caches.index(cells["Cache"])))


def table_of(rows: Sequence[Mapping[str, str]]) -> Cells:
    """Return the table of rows that have a cell for each heading, with a dash for those that they lack."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    return headings, [[row.get(heading, ABSENT) for heading in headings] for row in rows]


def _costs(row: EvalRow, rows: Sequence[EvalRow]) -> dict[str, str]:
    """Return cache bytes, KL, replay gap and, if measured, perplexity and learned reward, by headings."""
    reward = {} if row.learned_reward is None else {"Learned reward": f"{row.learned_reward:.2f}"}
    perplexity = {} if row.perplexity is None else {"Perplexity": f"{row.perplexity:.4g}"}
    return {
        "KV bytes": human_bytes(row.kv_bytes),
        "of dense": "evicts nothing" if evicts_nothing(row) else share_of_dense(row, rows),
        "KL": f"{row.kl:z.4f}",
        "Replay gap": f"{row.replay_gap:.1e}",
        **perplexity,
        **reward,
    }


def evicts_nothing(row: EvalRow) -> bool:
    """True if an evicting cache kept all keys of all responses."""
    return row.budget is not None and row.affected == 0


def _quality(row: EvalRow, *, with_intervals: bool) -> dict[str, str]:
    """Return accuracy and mean reward, as far as they are known, by their headings."""
    accuracy = accuracy_cell(row) if with_intervals else f"{row.accuracy or 0.0:.3f}"
    found = {} if row.accuracy is None else {"Accuracy": accuracy}
    return found if row.reward is None else {**found, "Reward": f"{row.reward:.3f}"}


def accuracy_cell(row: EvalRow) -> str:
    """Return an accuracy with its 95% Wilson interval if it has one, such as 81.0% [77.4, 84.2]."""
    interval = accuracy_interval(row)
    shown = f" [{100 * interval.low:.1f}, {100 * interval.high:.1f}]" if interval else ""
    return percent(row.accuracy) + shown


def percent(share: float | int | None) -> str:
    """Return a share as a percentage, such as 81.0%."""
    return ABSENT if share is None else f"{share:.1%}"


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
        cells = evaluation_cells({"before": before, "after": after})
        tables += [make_table(*cells), Text(KL_MEANING, style="dim")]
    # A run that a verifier rewards does not use its reward head.
    if reward_model is not None and any(row.learned_reward is not None for row in (*before, *after)):
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


def score_table(scored: Sequence[tuple[EvalRow, CacheEstimates]], level: float) -> Group:
    """Return both tables of `lit_rlkv.evaluate` for a terminal: scores with their intervals, and costs."""
    rows = [row for row, _ in scored]
    return Group(
        make_table(*table_of([{"Cache": row.cache, **_scores(found)} for row, found in scored])),
        Text(f"[low, high] is the {level:.0%} interval over prompts", style="dim"),
        Text(),
        make_table(*table_of([{"Cache": row.cache, **_costs(row, rows)} for row in rows])),
        Text(KL_MEANING, style="dim"),
    )


def _scores(found: CacheEstimates) -> dict[str, str]:
    """Return accuracy, reward, pass@k and length with their intervals, by their headings."""
    shares = {"Accuracy": found.accuracy, "Reward": found.reward}
    return {
        **{name: _with_interval(share, 3) for name, share in shares.items() if share is not None},
        **{f"pass@{k}": _with_interval(estimate, 3) for k, estimate in found.pass_at_k.items()},
        "Tokens": _with_interval(found.mean_length, 1),
    }


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
