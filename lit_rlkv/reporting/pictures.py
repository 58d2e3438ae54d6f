"""Figures of a report or of a comparison by section, each with a name and a caption on how to read it."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import curves, divergence, kept_keys, style
from lit_rlkv.reporting.plots.curves import CurveSet
from lit_rlkv.reporting.run_folder import RunReport
from lit_rlkv.reporting.run_metrics import History

log = logging.getLogger(__name__)

TRAINING, SFT, EVALUATION = "Training", "SFT", "Evaluation"
MISMATCH, CACHE, COST = "Mismatch", "Cache", "Cost"
"""Sections of the page; SFT is a part of Training."""

Measured = Mapping[str, Any]
"""A line of diagnostics.jsonl."""
BY_POSITION: dict[str, tuple[Callable[[Measured], Figure], str]] = {
    "Mismatch by position": (
        divergence.mismatch_by_position,
        "distance of the sampler from a policy that sees every key. It starts where keys are first evicted. "
        "A percentile far above the mean: few tokens carry it.",
    ),
    "Overlap by position": (
        divergence.overlap_by_position,
        "the probability that both distributions give to the same tokens. Where the 5th percentile falls to "
        "0, the dense policy would not sample some of the responses.",
    ),
    "Why reweighting explodes with length": (
        divergence.weights_by_position,
        "the weight of a response is a product over its tokens, so the spread of its log grows with the "
        "length, and the share of responses that count falls.",
    ),
}
"""Figures of the last line of the diagnostic `mismatch`."""
EVICTED: dict[str, tuple[Callable[[Measured], Figure], str]] = {
    "Evicted and later needed": (
        kept_keys.attention_on_evicted,
        "attention of the dense policy on evicted keys; near 0, only keys that are not used were evicted.",
    ),
}
"""Figures of the last line of the diagnostic `cache`."""


class Picture(NamedTuple):
    """A figure with its name and caption."""

    figure: Figure
    name: str
    caption: str
    section: str = ""

    @property
    def key(self) -> str:
        """Name for loggers, such as figures/cache_fill."""
        return "figures/" + re.sub(r"\W+", "_", self.name.lower())


Plan = tuple[str, str, str, Callable[[], Figure]]
"""Section, name and caption of a picture, and the function that draws it."""


def figures(report: RunReport) -> list[Picture]:
    """Return all pictures for which the run has data."""
    return draw_all(_plans(report))


def comparison_figures(runs: Mapping[str, RunReport]) -> list[Picture]:
    """Return the curves of all metrics that any run has logged, and the accuracies by budget."""
    return draw_all(_comparison_plans(runs))


def draw_all(plans: Iterable[Plan]) -> list[Picture]:
    """Draw the pictures; one that fails costs a warning, as no report may end a run."""
    pictures = []
    for section, name, caption, draw in plans:
        try:
            pictures.append(Picture(draw(), name, caption, section))
        except Exception as error:
            warn_of_figure(name, error)
    return pictures


def warn_of_figure(name: str, error: Exception) -> None:
    """Say that a figure is left out."""
    log.warning("the figure %r cannot be drawn: %s: %s", name, type(error).__name__, error)


def _logged_curves(section: str, histories: Sequence[History]) -> list[CurveSet]:
    """Return the curves that any run has; the verifier's score only where the reward is another."""
    rows = [row for history in histories for row in history]
    has_gold = any(row.get("rewards/exact_match", row.get("reward")) != row.get("reward") for row in rows)
    shown = [one for one in curves.CURVES[section] if has_gold or one.title != curves.GOLD]
    return [one for one in shown if one.logged(*histories)]


def _plans(report: RunReport) -> Iterator[Plan]:
    for section in curves.CURVES:
        history = report.sft_history if section == SFT else report.history
        for one in _logged_curves(section, [history]):
            yield section, one.title, one.caption, partial(curves.draw_metrics, one, history)
    if any(row.accuracy is not None for row in (*report.before, *report.after)):
        yield (
            EVALUATION,
            "Accuracy against budget",
            "The distance from a point up to the dashed line of its colour is the cost of eviction. Whiskers "
            "and bands are 95% Wilson intervals.",
            partial(curves.accuracy_against_budget, report.before, report.after),
        )
    yield from _last_measured(report, MISMATCH, "mismatch", BY_POSITION)
    if layers := report.measured("layers"):
        yield (
            MISMATCH,
            "Which layer's eviction matters",
            "A bar is the effect of the evictions of one layer alone; the dashed line is that of all layers "
            "together.",
            partial(divergence.layer_mismatch, layers[0], layers[-1]),
        )
    record = report.evictions
    # Prompts of several lengths stand beside the budget where they are protected.
    is_beside = report.config.get("cache", {}).get("protect_prompt")
    budget = None if is_beside else report.budget
    if record is not None:
        yield (
            CACHE,
            "Cache fill",
            "After every interval decode steps a cache above its budget is compacted to it, so it never "
            "holds more than budget + interval keys, beside a protected prompt. A dense cache grows with the "
            "text. The prompt is read before any key is evicted.",
            lambda: kept_keys.cache_fill(record["fill"], budget, report.interval),
        )
    yield from _last_measured(report, CACHE, "cache", EVICTED)
    if record is not None:
        yield (
            CACHE,
            "Key lifetimes in one sequence",
            "A bar is one key, from its own token to the first query that no longer sees it. Compare panels "
            "to see which heads keep keys that others evict.",
            lambda: kept_keys.key_lifetimes(record["lifetimes"]),
        )


def _last_measured(
    report: RunReport,
    section: str,
    diagnostic: str,
    shown: Mapping[str, tuple[Callable[[Measured], Figure], str]],
) -> Iterator[Plan]:
    """Yield the figures of the last line that a diagnostic has written."""
    for last in report.measured(diagnostic)[-1:]:
        for name, (draw, caption) in shown.items():
            yield section, name, f"In iteration {last['iteration']}: {caption}", partial(draw, last)


def _comparison_plans(runs: Mapping[str, RunReport]) -> Iterator[Plan]:
    for section in curves.CURVES:
        histories = {name: run.sft_history if section == SFT else run.history for name, run in runs.items()}
        for one in _logged_curves(section, list(histories.values())):
            for metric in one.logged(*histories.values()):
                title = one.title if len(one.metrics) == 1 else f"{one.title}: {one.metrics[metric]}"
                yield section, title, one.caption, partial(curves.draw_runs, one, metric, histories)
    rows = {name: run.after or run.before for name, run in runs.items()}
    if any(rows.values()):
        yield (
            EVALUATION,
            "Accuracy against budget",
            "After training. Dashed lines: the same model with a dense cache. Whiskers and bands are 95% "
            "Wilson intervals.",
            lambda: curves.accuracies(rows, [style.run_color(place) for place in range(len(rows))]),
        )
