"""report.html: one self-contained page with the results and figures of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from lit_rlkv.evaluation.intervals import accuracy_interval
from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.reporting import pictures as sections
from lit_rlkv.reporting.logged_samples import select_samples
from lit_rlkv.reporting.pictures import Picture
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.run_folder import RunFolder
from lit_rlkv.reporting.tables import evaluation_cells, percent, reward_sentence, share_of_dense, stage_cells
from lit_rlkv.settings import Sampling

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.globals["scheme"] = style.SCHEME


def _rows(report: RunFolder, budget: int | None) -> list[EvalRow]:
    """Return the rows of a cache before and after training, as far as it was evaluated."""
    return [row for rows in (report.before, report.after) for row in rows if row.budget == budget]


def tiles(report: RunFolder) -> list[tuple[str, str, str]]:
    """Return the main numbers as heading, value and note."""
    found = []
    for budget in dict.fromkeys((report.budget, None)):
        of_budget = _rows(report, budget)
        for cache in dict.fromkeys(row.cache for row in of_budget):
            rows = [row for row in of_budget if row.cache == cache]
            if rows[-1].accuracy is None:
                continue
            notes = [f"was {percent(rows[0].accuracy)}"] if len(rows) > 1 else []
            if interval := accuracy_interval(rows[-1]):
                notes.append(f"95% interval {100 * interval.low:.1f}–{100 * interval.high:.1f}")
            found.append((f"Accuracy, {rows[-1].cache}", percent(rows[-1].accuracy), "; ".join(notes)))
    _, reward = style.series(report.history, "reward")
    if len(reward):
        n_averaged = min(style.SMOOTHING, max(len(reward) // 2, 1))
        first, last = reward[:n_averaged].mean(), reward[-n_averaged:].mean()
        found.append(("Mean reward", f"{last:.2f}", f"was {first:.2f}; {len(reward)} iterations"))
    own = _rows(report, report.budget)
    if own and report.budget is not None:
        share = share_of_dense(own[-1], [*report.after, *report.before])
        found.append(("Cache memory", share, "of a dense cache"))
        found.append(("KL from dense", f"{own[-1].kl:z.3f}", "nats per token, by eviction"))
    return found


def render(report: RunFolder, pictures: Sequence[Picture]) -> str:
    """Return the page as HTML."""
    rows = [*report.before, *report.after]
    # A run that a verifier rewards does not use its reward head.
    quality = report.reward_model if any(row.learned_reward is not None for row in rows) else None
    sampling = report.config.get("evaluation", {})
    greedy = Sampling(temperature=0).options
    settings = [f"{key} {sampling[key]}" for key, off in greedy.items() if sampling.get(key, off) != off]
    last: dict[str, Any] = dict(report.environments[-1]) if report.environments else {}
    versions = {"python": last["python"], **last["packages"]} if last else {}
    return TEMPLATES.get_template("report.html.jinja").render(
        report=report,
        tiles=tiles(report),
        evaluation=evaluation_cells({"before": report.before, "after": report.after}, with_intervals=True),
        n_problems=max((row.n_problems for row in rows), default=0),
        quality=None if quality is None else reward_sentence(quality),
        stages=stage_cells(report.stage_seconds),
        samples=select_samples(report.samples),
        drawn=page_figures(pictures),
        decoding=f"sampled ({', '.join(settings)})" if sampling.get("temperature") else "greedy",
        sections=sections,
        versions=versions,
    )


def page_figures(pictures: Sequence[Picture]) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each section as the page shows them; one that cannot be drawn costs a warning."""
    found: dict[str, list[dict[str, Any]]] = {}
    for picture in pictures:
        try:
            svg = style.svg(picture.figure, picture.key)
        except Exception as error:
            sections.warn_of_figure(picture.name, error)
            continue
        is_wide = picture.figure.get_figwidth() > (style.HALF_WIDTH + style.FULL_WIDTH) / 2
        one = {"name": picture.name, "caption": picture.caption, "svg": svg, "is_wide": is_wide}
        found.setdefault(picture.section, []).append(one)
    return found
