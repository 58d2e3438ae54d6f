from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlkv.reporting.comparison import render_comparison, run_names
from lit_rlkv.reporting.pictures import comparison_figures
from lit_rlkv.reporting.plots import style
from tests.reporting.reports import CONFIG, EMPTY, FULL, Page, eval_row

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


def curve(name, runs=RUNS):
    figure = next(picture.figure for picture in comparison_figures(runs) if picture.name == name)
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_curves_of_all_runs_share_a_figure_in_their_own_colours():
    lines = curve("Reward: mean")
    assert list(lines["a"].get_ydata()) == [0.25, 0.75]
    assert list(lines["b"].get_ydata()) == [0.5, 0.25]
    assert (lines["a"].get_color(), lines["b"].get_color()) == (style.BLUE, style.VERMILLION)


def test_a_run_without_a_metric_has_no_curve_of_it_and_keeps_the_colours_of_the_others():
    lines = curve("Loss: critic")
    assert list(lines) == ["b"]
    assert lines["b"].get_color() == style.VERMILLION


def test_the_verifiers_score_is_compared_only_where_the_reward_is_another():
    def names(score):
        run = replace(EMPTY, history=[{"iteration": 1, "reward": 0.5, "rewards/exact_match": score}])
        return [picture.name for picture in comparison_figures({"a": run, "b": run})]

    assert names(0.5) == ["Reward: mean"]
    assert names(1.0) == ["Reward: mean", "Proxy and gold: gold"]


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


def test_a_run_is_not_compared_with_itself():
    with pytest.raises(ValueError, match="a run cannot be compared with itself: runs/a was given twice"):
        run_names([Path("runs/a"), Path("runs/a/")])
