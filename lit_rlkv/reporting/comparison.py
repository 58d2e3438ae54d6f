"""A page that compares runs: their curves in one figure each, their evaluations and configs side by side."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.files import write_atomically
from lit_rlkv.reporting.facts import differing
from lit_rlkv.reporting.pictures import COST, EVALUATION, MISMATCH, SFT, TRAINING, Picture, Plan, draw_all
from lit_rlkv.reporting.plots import curves, metric_curves, style
from lit_rlkv.reporting.plots.metric_curves import CurveSet
from lit_rlkv.reporting.report import TEMPLATES, page_figures
from lit_rlkv.reporting.run_folder import RunReport
from lit_rlkv.reporting.run_metrics import History
from lit_rlkv.reporting.svg import SCHEMES
from lit_rlkv.reporting.tables import ABSENT, Cells, accuracy_cell
from lit_rlkv.units import human_bytes

Runs = Mapping[str, RunReport]
"""Runs by their names on the page."""

REWARD = CurveSet(
    "Reward", "Mean reward of the rollouts, under each run's own cache.", "Mean reward", {"reward": "reward"}
)
SCORE = CurveSet(
    "Verifier's score",
    "Mean score of the rollouts by the task's verifier, comparable where the rewards are not.",
    "Score",
    {"rewards/exact_match": "score"},
)
MISMATCHES = CurveSet(
    "Mismatch",
    "Lower is better. μ: the sampler under its evicting cache; k3: an estimate of the KL that is never "
    "negative.",
    "Mismatch (nats)",
    # k1, an estimate that may be negative, has no place on a log axis.
    {metric: label for metric, (label, _) in curves.MISMATCHES.items() if metric != "rollout_corr/kl"},
    "log",
)
SECTIONS = {
    TRAINING: (REWARD, *metric_curves.TRAINING),
    MISMATCH: (MISMATCHES,),
    COST: (
        *metric_curves.COST,
        CurveSet(
            "Cache",
            "Allocated keys and values of a rollout.",
            "MiB",
            {"kv/bytes": "cache"},
            "from zero",
            scale=1 / curves.MIB,
        ),
        CurveSet(
            "Time of an iteration",
            "Of rollout, scoring and reward, and of the update.",
            "Seconds",
            {"time/data": "data", "time/update": "update"},
            "from zero",
        ),
    ),
}
"""Figures that draw the curves of all runs over the iterations."""


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ, such as `lr-3/seed-0`."""
    parts = [path.absolute().parts for path in run_dirs]
    longest = max(map(len, parts))
    for n_parts in range(1, longest + 1):
        names = [os.sep.join(path[-n_parts:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a run cannot be compared with itself: {run_dirs[0]} was given twice")


def write_comparison(path: Path, runs: Runs) -> None:
    """Write the page atomically."""
    write_atomically(path, render_comparison(runs, comparison_figures(runs)))


def comparison_figures(runs: Runs) -> list[Picture]:
    """Draw all metrics that any run has logged, and the accuracies by budget."""
    sections = {section: _curves(sets, runs) for section, sets in SECTIONS.items()}
    if any(_score_differs(run.history) for run in runs.values()):
        sections[TRAINING] = chain(_curves((SCORE,), runs), sections[TRAINING])
    sections[SFT] = _curves(metric_curves.SFT, runs, of_sft=True)
    sections[EVALUATION] = _accuracies(runs)
    return [picture for section, plans in sections.items() for picture in draw_all(section, plans)]


def _score_differs(history: History) -> bool:
    """Return True if the reward is not the verifier's score alone."""
    return any(row.get("rewards/exact_match", row.get("reward")) != row.get("reward") for row in history)


def _curves(sets: Sequence[CurveSet], runs: Runs, *, of_sft: bool = False) -> Iterator[Plan]:
    histories = {name: run.sft_history if of_sft else run.history for name, run in runs.items()}
    for one in sets:
        for metric in one.logged(*histories.values()):
            title = one.title if len(one.metrics) == 1 else f"{one.title}: {one.metrics[metric]}"
            yield Plan(partial(metric_curves.draw_runs, one, metric, histories), title, one.caption)


def _accuracies(runs: Runs) -> Iterator[Plan]:
    rows = {name: final_rows(run) for name, run in runs.items()}
    if any(rows.values()):
        colors = [style.run_color(place) for place in range(len(runs))]
        yield Plan(
            lambda: curves.accuracies(rows, colors),
            "Accuracy against budget",
            "After training. Dashed lines: the same model with a dense cache. Whiskers and bands are 95% "
            "Wilson intervals.",
        )


def final_rows(run: RunReport) -> Sequence[EvalRow]:
    """Return the last evaluation of a run: after training, or else the one before it."""
    return run.after or run.before


def comparison_cells(runs: Runs) -> Cells:
    """Return the last evaluation of each run side by side, a row for each cache of any run."""
    found = {name: {row.cache: row for row in final_rows(run)} for name, run in runs.items()}
    caches = dict.fromkeys(cache for rows in found.values() for cache in rows)
    headings = ["Cache"]
    headings += [f"{what}, {name}" for what in ("Accuracy", "KL", "KV bytes") for name in runs]
    rows = [
        [
            cache,
            *(_cell(rows.get(cache), accuracy_cell) for rows in found.values()),
            *(_cell(rows.get(cache), lambda row: f"{row.kl:z.4f}") for rows in found.values()),
            *(_cell(rows.get(cache), lambda row: human_bytes(row.kv_bytes)) for rows in found.values()),
        ]
        for cache in caches
    ]
    return headings, rows


def _cell(row: EvalRow | None, shown: Callable[[EvalRow], str]) -> str:
    return ABSENT if row is None else shown(row)


def render_comparison(runs: Runs, pictures: Sequence[Picture]) -> str:
    """Return the page as HTML."""
    facts = {name: run.facts for name, run in runs.items()}
    headings = dict.fromkeys(heading for found in facts.values() for heading in found)
    variables = {color: variable for variable, color in SCHEMES["light"].items()}
    return TEMPLATES.get_template("comparison.html.jinja").render(
        runs={name: variables[style.run_color(place)] for place, name in enumerate(runs)},
        facts=[[heading, *(found.get(heading, ABSENT) for found in facts.values())] for heading in headings],
        evaluation=comparison_cells(runs),
        n_problems=sorted({row.n_problems for run in runs.values() for row in final_rows(run)}),
        differing=differing({name: run.config for name, run in runs.items()}),
        drawn=page_figures(pictures),
        sections=[TRAINING, SFT, MISMATCH, COST],
    )
