"""A page that compares runs: each main curve in a figure, their evaluations and configs side by side."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_rlkv.config import ConfigError
from lit_rlkv.reporting.describe import differing
from lit_rlkv.reporting.pictures import CACHE, COST, MISMATCH, SFT, TRAINING, Picture
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.report import TEMPLATES, page_figures
from lit_rlkv.reporting.run_folder import RunFolder
from lit_rlkv.reporting.tables import ABSENT, evaluation_cells


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ, such as `lr-3/seed-0`.

    Raises:
        ConfigError: a run is given twice.
    """
    parts = [path.absolute().parts for path in run_dirs]
    longest = max(map(len, parts))
    for n_parts in range(1, longest + 1):
        names = [os.sep.join(path[-n_parts:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"a run cannot be compared with itself: {run_dirs[0]} was given twice")


def render_comparison(runs: Mapping[str, RunFolder], pictures: Sequence[Picture]) -> str:
    """Return the page of runs, by their names, as HTML."""
    evaluations = {name: run.last_evaluation for name, run in runs.items()}
    facts = {name: run.facts for name, run in runs.items()}
    headings = dict.fromkeys(heading for found in facts.values() for heading in found)
    variables = {light: name for name, (light, _) in style.SCHEME.items()}
    return TEMPLATES.get_template("comparison.html.jinja").render(
        runs={name: variables[style.run_color(place)] for place, name in enumerate(runs)},
        facts=[[heading, *(found.get(heading, ABSENT) for found in facts.values())] for heading in headings],
        evaluation=evaluation_cells(evaluations, name="Run", with_intervals=True),
        n_problems=sorted({row.n_problems for rows in evaluations.values() for row in rows}),
        differing=differing({name: run.config for name, run in runs.items()}),
        drawn=page_figures(pictures),
        sections=[TRAINING, SFT, MISMATCH, CACHE, COST],
    )
