"""report.html: one self-contained page that says what a run gained, and how to read its pictures."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lit_rlkv.callbacks import plots
from lit_rlkv.callbacks.samples import Sample
from lit_rlkv.callbacks.summary import (
    KL_MEANING,
    evaluation_cells,
    human_seconds,
    learned_cells,
    reward_sentence,
)
from lit_rlkv.data.reward_evaluation import RewardReport
from lit_rlkv.types import EvalRow, Rollout

PIXELS_PER_INCH = 200
"""Of the pictures; the page shows them at half of it, so they are sharp on dense screens."""


@dataclass(frozen=True)
class RunReport:
    """All that the page shows; what a run did not do is empty or None, and its section is left out."""

    title: str
    config_yaml: str
    history: plots.History
    before: list[EvalRow]
    after: list[EvalRow]
    rollout: Rollout | None
    """An evaluation rollout under the budget."""
    budget: int | None
    """Of the run's own cache; None if it is dense."""
    interval: int | None
    stage_seconds: dict[str, float]
    samples: list[Sample]
    versions: dict[str, str]
    reward_model: RewardReport | None = None
    """What the reward head is worth on held-out pairs."""
    token_labels: Mapping[int, str] | None = None
    """What to write for each token id beside the key lifetimes."""


def write_report(path: Path, report: RunReport) -> None:
    """Write the page; a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(render(report), encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def render(report: RunReport) -> str:
    """The page as HTML."""
    sections = [
        f"<h1>{escape(report.title)}</h1>",
        *(f'<p class="headline">{escape(sentence)}</p>' for sentence in headline(report)),
        _evaluation(report),
        _figures(report),
        _samples(report.samples),
        _times(report.stage_seconds),
        _config(report.config_yaml),
        _versions(report.versions),
    ]
    body = "\n".join(section for section in sections if section)
    return _PAGE.format(title=escape(report.title), style=_STYLE, body=body)


def headline(report: RunReport) -> list[str]:
    """What the run achieved, in one sentence or two."""
    sentences = [_accuracy_sentence(report)] if report.before or report.after else []
    _, reward = plots.series(report.history, "reward")
    if len(reward):
        n_averaged = min(plots.SMOOTHING, max(len(reward) // 2, 1))
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
    """`0.46 → 0.81`, or the one number there is, or nothing."""
    found = [row.accuracy for rows in (report.before, report.after) for row in rows if row.budget == budget]
    return " → ".join(f"{accuracy:.2f}" for accuracy in found)


def _evaluation(report: RunReport) -> str:
    if not report.before and not report.after:
        return ""
    n_problems = max(row.n_problems for row in (*report.before, *report.after))
    note = (
        f"{n_problems} held-out problems. {KL_MEANING}: how far eviction moves the sampler from the same "
        "model with all its keys. The replay gap is the largest difference between a recorded log-prob "
        "and its replay: 0 but for rounding, or replay is broken."
    )
    headings, cells = learned_cells(report.before, report.after)
    learned = _table(headings, cells) if cells else ""
    accuracy = _table(*evaluation_cells(report.before, report.after))
    return f"<h2>Evaluation</h2>{accuracy}<p class=note>{note}</p>{learned}"


def _figures(report: RunReport) -> str:
    parts = [_picture(figure, name, caption) for figure, name, caption in figures(report)]
    return f'<h2>Pictures</h2><div class="figures">{"".join(parts)}</div>' if parts else ""


def figures(report: RunReport) -> list[tuple[Figure, str, str]]:
    """Each figure that the run has data for, with its name and one sentence on how to read it."""
    shown = []
    if _logged(report.history, ["reward"]):
        shown.append(
            (
                plots.reward_curve(report.history),
                "Reward",
                "The thick line is the trend of what rollouts scored during training; the band is how far "
                "responses to one prompt differ, and where it vanishes there is nothing left to learn from.",
            )
        )
    if _logged(report.history, ["rewards/learned"]):
        shown.append(
            (
                plots.proxy_and_gold(report.history),
                "Proxy and gold",
                "The policy climbs the reward model's opinion; where the verifier's score does not follow, "
                "it has learned to please the reward model and no more.",
            )
        )
    if report.reward_model is not None:
        judged = report.reward_model
        shown.append(
            (
                plots.reliability(judged.bin_confidence, judged.bin_accuracy, judged.bin_counts),
                "How sure the reward model should be",
                f"{reward_sentence(judged)}; below the diagonal on the right it is surer than it should be.",
            )
        )
    if report.before or report.after:
        shown.append(
            (
                plots.accuracy_against_budget(report.before, report.after),
                "Accuracy against budget",
                "The distance from a point up to the dashed line of its colour is what eviction costs there.",
            )
        )
    if _logged(report.history, plots.MISMATCHES):
        shown.append(
            (
                plots.mismatch(report.history),
                "Mismatch of sampler and learner",
                "Lower is better on every line, and a replay gap far below the rest means that the learner "
                "saw exactly what the sampler saw.",
            )
        )
    if report.rollout is not None:
        shown.append(
            (
                plots.cache_fill(report.rollout, report.budget, report.interval),
                "Cache fill",
                "The cache fills up to its slots and falls back to its budget, while a dense cache, the "
                "dashed line, grows with the text; the prompt is read before any key is evicted.",
            )
        )
        shown.append(
            (
                _lifetimes(report.rollout, report.token_labels),
                "Key lifetimes in one sequence",
                "A bar is one key, from its own token to the query that first misses it: compare panels to "
                "see which head still holds what another has lost.",
            )
        )
    return shown


def _logged(history: plots.History, metrics: Sequence[str] | Mapping[str, str]) -> bool:
    return any(len(plots.series(history, metric)[0]) for metric in metrics)


def _lifetimes(rollout: Rollout, token_labels: Mapping[int, str] | None) -> Figure:
    """Of the longest sequence, where the most is evicted."""
    row = int(rollout.is_token.sum(dim=1).argmax())
    if token_labels is None:
        return plots.key_lifetimes(rollout, row)
    token_ids = rollout.token_ids[row][rollout.is_token[row]].tolist()
    return plots.key_lifetimes(rollout, row, [token_labels.get(id_, "?") for id_ in token_ids])


def _picture(figure: Figure, name: str, caption: str) -> str:
    buffer = io.BytesIO()
    # Transparent, so that the page's own background shows, and its dark scheme can invert the ink.
    figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, transparent=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    width, height = (round(inches * PIXELS_PER_INCH / 2) for inches in figure.get_size_inches())
    is_wide = figure.get_size_inches()[0] > np.mean([plots.HALF_WIDTH, plots.FULL_WIDTH])
    image = f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(name)}">'
    caption = f"<figcaption><b>{escape(name)}.</b> {escape(caption)}</figcaption>"
    return f"<figure{' class=wide' if is_wide else ''}>{image}{caption}</figure>"


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = "".join(
        f'<tr><td class="number">{sample.iteration}</td><td class="text">{escape(sample.prompt)}</td>'
        f'<td class="text">{escape(sample.completion)}</td><td class="number">{sample.reward:.2f}</td></tr>'
        for sample in samples
    )
    headings = (
        ("Iteration", " class=number"),
        ("Prompt", ""),
        ("Completion", ""),
        ("Reward", " class=number"),
    )
    head = "<tr>" + "".join(f"<th{kind}>{heading}</th>" for heading, kind in headings) + "</tr>"
    return f"<h2>Samples</h2><div class=scroll><table class=samples>{head}{rows}</table></div>"


def _times(stage_seconds: Mapping[str, float]) -> str:
    if not stage_seconds:
        return ""
    total = f"<p class=note>{human_seconds(sum(stage_seconds.values()))} in all.</p>"
    picture = _picture(
        plots.time_per_stage(stage_seconds), "Time per stage", "Each bar is the wall-clock time of one stage."
    )
    return f"<h2>Time</h2>{total}<div class=figures>{picture}</div>"


def _config(config_yaml: str) -> str:
    if not config_yaml:
        return ""
    return f"<details><summary>Config</summary><pre>{escape(config_yaml)}</pre></details>"


def _versions(versions: Mapping[str, str]) -> str:
    listed = " · ".join(f"{escape(name)} {escape(version)}" for name, version in versions.items())
    return f"<footer>{listed}</footer>" if listed else ""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column text, the others numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["", *[' class="number"'] * (len(cells) - 1)]
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{line(headings, 'th')}</tr>{body}</table></div>"


_STYLE = """
:root { color-scheme: light dark;
  --ink: #1f2430; --muted: #5f6673; --line: #e3e6eb; --paper: #ffffff; --card: #f6f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --muted: #9aa2b1; --line: #30363f; --paper: #14171c; --card: #1c2027 }
  figure img { filter: invert(1) hue-rotate(180deg) }
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1060px; font: 15px/1.5 system-ui, sans-serif;
  background: var(--paper); color: var(--ink) }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem }
.headline { font-size: 1.15rem; margin: .25rem 0 }
.note, figcaption, footer { color: var(--muted); font-size: .87rem }
.note { max-width: 48rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .92rem }
th, td { padding: .35rem 1.1rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
th { font-weight: 600; white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.samples { width: 100% }
table:not(.samples) td { white-space: nowrap }
.text { font: .85rem ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.figures { display: grid; gap: 1.5rem 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)) }
figure { margin: 0; min-width: 0 }
figure.wide { grid-column: 1 / -1 }
figure img { max-width: 100%; height: auto; display: block }
figcaption { margin-top: .35rem }
figcaption b { color: var(--ink) }
details { margin-top: 2.25rem }
summary { cursor: pointer; font-weight: 600 }
pre { background: var(--card); padding: 1rem; overflow-x: auto; font-size: .82rem; border-radius: 6px }
footer { margin-top: 2rem }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
