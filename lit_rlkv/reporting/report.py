"""report.html: one self-contained page with the results and figures of a run."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template
from matplotlib.figure import Figure

from lit_rlkv.evaluation.results import EvalRow, RewardReport
from lit_rlkv.files import write_atomically
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.logged_samples import LoggedSample
from lit_rlkv.reporting.tables import KL_MEANING, evaluation_cells, learned_cells
from lit_rlkv.types import Rollout

PAGE = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
TEMPLATE = Template(PAGE, autoescape=True, trim_blocks=True, lstrip_blocks=True)

PIXELS_PER_INCH = 200
"""Resolution of the figures; the page shows them at half size for high-density screens."""


class Picture(NamedTuple):
    """A figure with its name and caption."""

    figure: Figure
    name: str
    caption: str

    @property
    def key(self) -> str:
        """Name for loggers, such as figures/cache_fill."""
        return "figures/" + re.sub(r"\W+", "_", self.name.lower())


@dataclass(frozen=True)
class RunReport:
    """Data of the page; sections whose data is empty or None are left out."""

    title: str
    config_yaml: str
    history: style.History
    before: list[EvalRow]
    after: list[EvalRow]
    rollout: Rollout | None
    """An evaluation rollout under the budget."""
    budget: int | None
    """Budget of the run's own cache; None if it is dense."""
    interval: int | None
    stage_seconds: dict[str, float]
    samples: list[LoggedSample]
    versions: dict[str, str]
    reward_model: RewardReport | None = None
    """Quality of the reward head on held-out pairs."""
    token_labels: Mapping[int, str] | None = None
    """Label of each token id for the figure of key lifetimes."""
    diagnostics: Sequence[Mapping[str, Any]] = ()
    """The lines of diagnostics.jsonl."""

    def measured(self, name: str) -> list[Mapping[str, Any]]:
        """Return the lines of one diagnostic in the order of iterations."""
        return [row for row in self.diagnostics if row["name"] == name]


def headline(report: RunReport) -> list[str]:
    """Return the results of the run in one or two sentences."""
    sentences = [_accuracy_sentence(report)] if report.before or report.after else []
    _, reward = style.series(report.history, "reward")
    if len(reward):
        n_averaged = min(style.SMOOTHING, max(len(reward) // 2, 1))
        first, last = reward[:n_averaged].mean(), reward[-n_averaged:].mean()
        over = f"over {len(reward)} iterations" if len(reward) > 1 else "in one iteration"
        change = f"{first:.2f} → {last:.2f}" if len(reward) > 1 else f"{last:.2f}"
        sentences.append(f"Mean reward of the rollouts {over}: {change}.")
    return sentences or ["This run neither trained nor evaluated a policy."]


def _accuracy_sentence(report: RunReport) -> str:
    dense = _gain(report, None)
    sparse = "" if report.budget is None else _gain(report, report.budget)
    if not sparse:
        return f"Accuracy with a dense cache: {dense}." if dense else "The run's own cache was not evaluated."
    under = f"Accuracy under a budget of {report.budget} keys: {sparse}"
    return f"{under}; dense: {dense}." if dense else f"{under}."


def _gain(report: RunReport, budget: int | None) -> str:
    """Return the accuracies before and after, such as `0.46 → 0.81`; empty if there are none."""
    found = [row.accuracy for rows in (report.before, report.after) for row in rows if row.budget == budget]
    return " → ".join(f"{accuracy:.2f}" for accuracy in found)


def write_report(path: Path, report: RunReport, pictures: Sequence[Picture]) -> None:
    """Write the page atomically."""
    write_atomically(path, render(report, pictures))


def render(report: RunReport, pictures: Sequence[Picture]) -> str:
    """Return the page as HTML."""
    rows = [*report.before, *report.after]
    return TEMPLATE.render(
        report=report,
        sentences=headline(report),
        evaluation=evaluation_cells(report.before, report.after),
        learned=learned_cells(report.before, report.after),
        n_problems=max((row.n_problems for row in rows), default=0),
        kl_meaning=KL_MEANING,
        pictures=[_image(picture) for picture in pictures],
    )


def _image(picture: Picture) -> dict[str, Any]:
    """Return a picture as a PNG for the page, with its size in CSS pixels."""
    buffer = io.BytesIO()
    # Transparent, so that the dark scheme of the page can invert the image.
    picture.figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, transparent=True)
    width, height = picture.figure.get_size_inches()
    return {
        "name": picture.name,
        "caption": picture.caption,
        "png": base64.b64encode(buffer.getvalue()).decode(),
        "width": round(width * PIXELS_PER_INCH / 2),
        "height": round(height * PIXELS_PER_INCH / 2),
        "is_wide": width > (style.HALF_WIDTH + style.FULL_WIDTH) / 2,
    }
