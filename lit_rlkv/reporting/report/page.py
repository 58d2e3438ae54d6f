"""report.html: one self-contained page."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from lit_rlkv.files import write_atomically
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.report.content import Picture, RunReport, headline
from lit_rlkv.reporting.report.pictures import figures
from lit_rlkv.reporting.samples import LoggedSample
from lit_rlkv.reporting.tables import KL_MEANING, evaluation_cells, learned_cells

STYLE = """
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

PAGE = """<!DOCTYPE html>
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


PIXELS_PER_INCH = 200
"""Resolution of the figures; the page shows them at half size for high-density screens."""


def write_report(path: Path, report: RunReport, pictures: Sequence[Picture] | None = None) -> None:
    """Write the page atomically.

    Args:
        pictures: the result of `figures(report)`; None draws them now.
    """
    write_atomically(path, render(report, pictures))


def render(report: RunReport, pictures: Sequence[Picture] | None = None) -> str:
    """Return the page as HTML."""
    sections = [
        f"<h1>{escape(report.title)}</h1>",
        *(f'<p class="headline">{escape(sentence)}</p>' for sentence in headline(report)),
        _evaluation(report),
        _figures(figures(report) if pictures is None else pictures),
        _samples(report.samples),
        _config(report.config_yaml),
        _versions(report.versions),
    ]
    body = "\n".join(section for section in sections if section)
    return PAGE.format(title=escape(report.title), style=STYLE, body=body)


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


def _figures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    return f'<h2>Pictures</h2><div class="figures">{"".join(map(_figure, pictures))}</div>'


def _figure(picture: Picture) -> str:
    figure, name, caption = picture
    buffer = io.BytesIO()
    # Transparent, so that the dark scheme of the page can invert the image.
    figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, transparent=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    width, height = (round(inches * PIXELS_PER_INCH / 2) for inches in figure.get_size_inches())
    is_wide = figure.get_size_inches()[0] > np.mean([style.HALF_WIDTH, style.FULL_WIDTH])
    image = f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(name)}">'
    below = f"<figcaption><b>{escape(name)}.</b> {escape(caption)}</figcaption>"
    return f"<figure{' class=wide' if is_wide else ''}>{image}{below}</figure>"


def _samples(samples: Sequence[LoggedSample]) -> str:
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


def _config(config_yaml: str) -> str:
    if not config_yaml:
        return ""
    return f"<details><summary>Config</summary><pre>{escape(config_yaml)}</pre></details>"


def _versions(versions: Mapping[str, str]) -> str:
    listed = " · ".join(f"{escape(name)} {escape(version)}" for name, version in versions.items())
    return f"<footer>{listed}</footer>" if listed else ""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table: the first column is text, the others are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["", *[' class="number"'] * (len(cells) - 1)]
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{line(headings, 'th')}</tr>{body}</table></div>"
