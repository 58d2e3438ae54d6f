"""Figures of a report or of a comparison by section, each with a name and a caption on how to read it."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import curves, divergence, kept_keys, style
from lit_rlkv.reporting.run_folder import RunFolder

log = logging.getLogger(__name__)

TRAINING, SFT, EVALUATION = "Training", "SFT", "Evaluation"
MISMATCH, CACHE, COST = "Mismatch", "Cache", "Cost"
"""Sections of the page; SFT is a part of Training."""

CAPTIONS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("captions.yaml").read_text(encoding="utf-8")
)
"""How to read a figure that is no curve of a metric, by its name."""
BY_POSITION = {
    "Mismatch by position": divergence.mismatch_by_position,
    "Overlap by position": divergence.overlap_by_position,
    "Why reweighting explodes with length": divergence.weights_by_position,
}
"""Figures of the last line of the diagnostic `mismatch`."""


class Picture(NamedTuple):
    """A figure with its name and caption."""

    figure: Figure
    name: str
    caption: str
    section: str = ""

    @property
    def key(self) -> str:
        """Name for loggers, such as figures/key_lifetimes_in_one_sequence."""
        return "figures/" + re.sub(r"\W+", "_", self.name.lower())


Plan = tuple[str, str, str, Callable[[], Figure]]
"""Section, name and caption of a picture, and the function that draws it."""


def figures(report: RunFolder) -> list[Picture]:
    """Return all pictures for which the run has data."""
    return _draw_all(_plans(report))


def comparison_figures(runs: Mapping[str, RunFolder]) -> list[Picture]:
    """Return the main curves that any run has, and the accuracies by budget."""
    return _draw_all(_comparison_plans(runs))


def _draw_all(plans: Iterable[Plan]) -> list[Picture]:
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


def _plans(report: RunFolder) -> Iterator[Plan]:
    for section in curves.CURVES:
        history = report.sft_history if section == SFT else report.history
        for one in curves.logged_curves(section, [history]):
            yield section, one.title, one.caption, partial(curves.draw_metrics, one, history)
    if any(row.accuracy is not None for row in (*report.before, *report.after)):
        draw_accuracy = curves.accuracy_against_budget
        yield _plan(EVALUATION, "Accuracy against budget", draw_accuracy, report.before, report.after)
    for last in report.measured("mismatch")[-1:]:
        for name, draw in BY_POSITION.items():
            yield MISMATCH, name, f"In iteration {last['iteration']}: {CAPTIONS[name]}", partial(draw, last)
    if layers := report.measured("layers"):
        name = "Which layer's eviction matters"
        yield _plan(MISMATCH, name, divergence.layer_mismatch, layers[0], layers[-1])
    if report.evictions is not None:
        lifetimes = report.evictions["lifetimes"]
        yield _plan(CACHE, "Key lifetimes in one sequence", kept_keys.key_lifetimes, lifetimes)


def _plan(section: str, name: str, draw: Callable[..., Figure], *data: Any) -> Plan:
    return section, name, CAPTIONS[name], partial(draw, *data)


def _comparison_plans(runs: Mapping[str, RunFolder]) -> Iterator[Plan]:
    for section in curves.CURVES:
        histories = {name: run.sft_history if section == SFT else run.history for name, run in runs.items()}
        for one in curves.logged_curves(section, list(histories.values())):
            logged = one.logged(*histories.values())
            for metric in [name for name in logged if name in one.compared] or logged[:1]:
                title = one.title if len(one.metrics) == 1 else f"{one.title}: {one.metrics[metric]}"
                yield section, title, one.caption, partial(curves.draw_runs, one, metric, histories)
    rows = {name: run.last_evaluation for name, run in runs.items()}
    if any(rows.values()):
        colors = [style.run_color(place) for place in range(len(rows))]
        yield _plan(EVALUATION, "Accuracy of the runs against budget", curves.accuracies, rows, colors)
