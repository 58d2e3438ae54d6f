from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlkv.reporting.comparison import render_comparison, run_names
from lit_rlkv.reporting.pictures import comparison_figures
from tests.reporting.reports import CONFIG, FULL, Page, eval_row

OTHER = replace(
    FULL,
    config_yaml=CONFIG.replace("replays: true", "replays: false").replace("seed: 3", "seed: 4"),
    history=[
        {"iteration": 1, "reward": 0.5, "smd/kl": 0.1},
        {"iteration": 2, "reward": 0.25, "value_loss": 1.0},
    ],
    before=[],
    after=[eval_row("dense", None, 0.9), eval_row("h2o 8+4", 8, 0.5)],
)
RUNS = {"a": FULL, "b": OTHER}


@pytest.fixture(scope="module")
def page():
    return Page(render_comparison(RUNS, comparison_figures(RUNS)))


def test_the_page_has_its_sections_and_needs_nothing_from_outside(page):
    assert page.is_balanced
    assert page.open == []
    sections = ("Runs", "Evaluation", "Training", "Mismatch", "Config")
    assert [name for name in page.ids if name in sections] == list(sections)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["sweep/lr-1/seed-0", "sweep/lr-2/seed-0"], ["lr-1/seed-0", "lr-2/seed-0"]),
    ],
)
def test_runs_are_named_by_the_shortest_paths_that_differ(paths, names):
    assert run_names([Path(path) for path in paths]) == names
