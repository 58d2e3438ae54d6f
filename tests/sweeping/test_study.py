"""Runs that a study hands out, their order, and what a later process resumes."""

import math

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.study import SweepStudy
from lit_rlkv.sweeping.sweep_file import n_runs
from tests.sweeping.files import BAYES, GRID, plan_of, with_parameters

RANDOM = BAYES | {"method": "random"}


def study(folder, content=GRID, n=None, overrides=()):
    plan = plan_of(folder, content, *overrides)
    return SweepStudy(plan, folder / "sweep", n_runs(plan.sweep, n))


def finished(value=0.5):
    return Outcome("finished", {"eval/accuracy": value, "reward": value}, [value])


def drain(book, outcome=None):
    """Give out all that is left; every run ends in the same way."""
    runs = []
    while (run := book.next_run()) is not None:
        runs.append(run)
        book.finish(run, outcome or finished())
    return runs


def test_a_grid_is_given_out_in_order_and_each_cell_once(tmp_path):
    runs = drain(study(tmp_path))
    assert [(run.values["seed"], run.values["cache.budget"]) for run in runs] == [
        (0, 12), (0, 16), (1, 12), (1, 16),
    ]  # fmt: skip
    assert [run.folder.name for run in runs] == ["0000-0-12", "0001-0-16", "0002-1-12", "0003-1-16"]
    assert drain(study(tmp_path)) == []


def test_a_bound_can_be_raised_later(tmp_path):
    assert len(drain(study(tmp_path, n=1))) == 1
    assert [run.number for run in drain(study(tmp_path, n=3))] == [1, 2]
    assert drain(study(tmp_path, n=2)) == []


def test_interrupted_runs_are_resumed_first_in_their_folders(tmp_path):
    book = study(tmp_path)
    first, second = book.next_run(), book.next_run()
    book.finish(second, finished())
    again = study(tmp_path)
    assert [run.folder for run, _ in again.outcomes()] == [second.folder]
    runs = drain(again)
    assert runs[0] == first
    assert [run.number for run in runs] == [0, 2, 3]


def test_a_failed_run_is_tried_again_by_the_next_process_only(tmp_path):
    book = study(tmp_path)
    bad = book.next_run()
    book.finish(bad, Outcome("failed", reason="ended with exit status 1"))
    assert bad.folder not in [run.folder for run in drain(book)]
    assert [outcome.state for _, outcome in book.outcomes()].count("failed") == 1
    runs = drain(study(tmp_path))
    assert [run.folder for run in runs] == [bad.folder]
    assert runs[0].values == bad.values
    assert [outcome.state for _, outcome in study(tmp_path).outcomes()] == ["finished"] * 4


def test_stopped_runs_and_runs_without_a_finite_metric_are_not_repeated(tmp_path):
    book = study(tmp_path)
    book.finish(book.next_run(), Outcome("stopped", {"eval/accuracy": 0.1}, [0.3, 0.1], "behind at 2"))
    book.finish(book.next_run(), finished(math.nan))
    assert [run.number for run in drain(study(tmp_path))] == [2, 3]


def test_a_search_that_goes_on_draws_what_it_would_have_drawn(tmp_path):
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    straight.mkdir()
    cut.mkdir()
    whole = [run.values for run in drain(study(straight, RANDOM, 6))]
    parts = [run.values for n in (2, 4, 6) for run in drain(study(cut, RANDOM, n))]
    assert parts == whole
    assert len({values["optimizer.lr"] for values in whole}) == 6  # and not the first ones again
    logs = [math.log10(values["optimizer.lr"]) for values in whole]
    assert all(-5 <= log <= -1 for log in logs)


def test_a_folder_that_holds_another_sweep_is_refused(tmp_path):
    drain(study(tmp_path))
    with pytest.raises(ConfigError, match="holds a sweep with other overrides; give another --dir"):
        study(tmp_path, overrides=("experiment=tis",))
    with pytest.raises(ConfigError, match="holds a sweep with other method and parameters"):
        study(tmp_path, RANDOM | {"metric": GRID["metric"]})
    drain(study(tmp_path, GRID | {"description": "in other words"}))  # what does not change the runs


def test_outcomes_come_back_as_they_were(tmp_path):
    book = study(tmp_path)
    outcome = Outcome("stopped", {"reward": 0.25, "eval/kl": math.nan}, [0.5, 0.25], "behind at 2")
    book.finish(book.next_run(), outcome)
    ((_, found),) = study(tmp_path).outcomes()
    assert (found.state, found.history, found.reason) == ("stopped", [0.5, 0.25], "behind at 2")
    assert found.metrics["reward"] == 0.25
    assert math.isnan(found.metrics["eval/kl"])


def grid_of(seeds, budgets=(12, 16)):
    return with_parameters(seed={"values": list(seeds)}, cache__budget={"values": list(budgets)})


def test_a_grid_gains_values_and_runs_the_new_combinations_alone(tmp_path):
    assert len(drain(study(tmp_path, grid_of([0, 1])))) == 4
    grown = drain(study(tmp_path, grid_of([0, 2, 1], [8, 12, 16])))
    assert [(run.values["seed"], run.values["cache.budget"]) for run in grown] == [
        (0, 8), (2, 8), (2, 12), (2, 16), (1, 8),
    ]  # fmt: skip
    assert [run.number for run in grown] == [4, 5, 6, 7, 8]
    assert len(list(study(tmp_path, grid_of([0, 2, 1], [8, 12, 16])).outcomes())) == 9


def test_interrupted_and_failed_runs_keep_their_folders_in_a_larger_grid(tmp_path):
    book = study(tmp_path, grid_of([0], [12, 16]))
    bad, cut = book.next_run(), book.next_run()
    book.finish(bad, Outcome("failed", reason="ended"))
    runs = drain(study(tmp_path, grid_of([0, 1], [12, 16])))
    assert [run.folder for run in runs[:2]] == [cut.folder, bad.folder]
    assert [run.values["seed"] for run in runs] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "content",
    [
        grid_of([0, 2]),  # a value less
        grid_of([0, 1], [12]),
        with_parameters(seed={"values": [0, 1, 2]}),  # a parameter less
        with_parameters(grid_of([0, 1]), **grid_of([0, 1])["parameters"], task={"values": ["recall"]}),
        with_parameters(grid_of([0, 1]), **grid_of([0, 1, 2])["parameters"], experiment={"value": "tis"}),
    ],
)
def test_a_grid_gains_nothing_but_values(tmp_path, content):
    drain(study(tmp_path, grid_of([0, 1])))
    with pytest.raises(ConfigError, match="other parameters; a grid may gain values, and nothing else"):
        study(tmp_path, content)


def test_a_search_does_not_grow(tmp_path):
    drain(study(tmp_path, RANDOM, 1))
    wider = with_parameters(
        RANDOM, **RANDOM["parameters"] | {"experiment": {"values": ["naive", "smd", "tis"]}}
    )
    with pytest.raises(ConfigError, match="holds a sweep with other parameters; give another --dir"):
        study(tmp_path, wider, 2)


def test_the_order_in_which_overrides_were_typed_is_no_other_sweep(tmp_path):
    drain(study(tmp_path, overrides=("task=recall", "algorithm=rloo")))
    assert drain(study(tmp_path, overrides=("algorithm=rloo", "task=recall"))) == []
