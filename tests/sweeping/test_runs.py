from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweep import check
from lit_rlkv.sweeping.runs import SweepStudy
from lit_rlkv.sweeping.sweep_file import read_sweep
from lit_rlkv.trust import trusting
from tests.sweeping.files import BAYES, GRID, sweep_of, with_parameters
from tests.whole_runs import TINY

SMALL = [option for option in TINY if not option.startswith("cache.budget")]


ENDS = (float("nan"), 1.0, float("inf"), 2.0)


def study_of(folder, content=GRID, *overrides):
    sweep = sweep_of(folder, content, *overrides)
    return SweepStudy(sweep, folder / "sweep", sweep.n_runs())


def end(run, value=1.0):
    """Leave what a run that has ended leaves."""
    run.folder.mkdir()
    (run.folder / "metrics.csv").write_text(f"iteration,entropy,eval/accuracy\n1,{value},{value}\n")
    return run


def all_values(study):
    found = []
    for run in study.unfinished():
        study.finish(end(run, 0.1 * len(found)))
        found.append(tuple(run.values.values()))
    return found


def test_a_grid_is_run_once_each_in_its_order(tmp_path):
    assert all_values(study_of(tmp_path)) == [("0", "5"), ("0", "7"), ("1", "5"), ("1", "7")]
    assert all_values(study_of(tmp_path)) == []


def test_a_run_that_was_cut_short_is_the_next_one_and_keeps_its_folder(tmp_path):
    study = study_of(tmp_path)
    todo = study.unfinished()
    first, second = next(todo), next(todo)
    study.finish(end(second))
    again = study_of(tmp_path)
    assert next(again.unfinished()) == first
    assert [run.number for run in again.ended()] == [second.number]


def test_the_folder_of_another_sweep_is_refused(tmp_path):
    all_values(study_of(tmp_path))
    for changed in (GRID | {"method": "random", "run_cap": 3}, GRID | {"metric": {"name": "reward"}}):
        with pytest.raises(ConfigError, match="holds another sweep"):
            study_of(tmp_path, changed)
    with pytest.raises(ConfigError, match="holds another sweep"):
        study_of(tmp_path, GRID, "task=sorting")


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_search_draws_what_one_without_a_break_draws(tmp_path, method):
    content = BAYES | {"method": method}
    (tmp_path / "whole").mkdir()
    whole = all_values(study_of(tmp_path / "whole", content))
    assert len(set(whole)) == 5
    found = []
    for _ in range(5):  # a process of its own for each run
        study = study_of(tmp_path, content)
        run = next(study.unfinished())
        study.finish(end(run, 0.1 * len(found)))
        found.append(tuple(run.values.values()))
    assert found == whole


@pytest.mark.parametrize("name", ["nosuch", "entropy"])
def test_a_run_without_a_finite_value_has_ended_and_is_not_run_again(tmp_path, name):
    study = study_of(tmp_path, GRID | {"metric": {"name": name}})
    values = [study.finish(end(run, value)) for run, value in zip(study.unfinished(), ENDS, strict=True)]
    assert values == ([None] * 4 if name == "nosuch" else [None, 1.0, None, 2.0])
    again = study_of(tmp_path, GRID | {"metric": {"name": name}})
    assert ([*again.unfinished()], len(again.ended())) == ([], 4)


@pytest.mark.parametrize(
    ("metric", "overrides", "says"),
    [
        ({}, ["stages=[sft,rl]"], "metric=eval/accuracy needs the stage eval and"),
        ({"name": "eval/kl"}, ["stages=[rl]", "model.path=x"], "metric=eval/kl needs the stage eval"),
        ({}, ["task=preferences", "task.path=tests/data/preferences.jsonl", "reward=learned"],
         "metric=eval/accuracy needs .* answers or reward.accuracy"),
    ],
)  # fmt: skip
def test_a_metric_that_no_run_will_have_is_known_before(tmp_path, metric, overrides, says):
    small = [option for option in SMALL if "task." not in option]
    with pytest.raises(ConfigError, match=says):
        check(sweep_of(tmp_path, GRID | {"metric": metric}, *small, *overrides))
    check(sweep_of(tmp_path, GRID | {"metric": {"name": "reward"}}, *small, *overrides))


def test_combinations_are_checked_before_the_first_run_and_named(tmp_path):
    check(sweep_of(tmp_path, GRID, *SMALL))
    with pytest.raises(ConfigError, match=r"in the run with seed=0 cache\.budget=1"):
        check(
            sweep_of(
                tmp_path, with_parameters(seed={"values": [0]}, cache__budget={"values": [7, 1]}), *SMALL
            )
        )
    with pytest.raises(ConfigError, match=r"cache\.budget=1"):
        check(sweep_of(tmp_path, BAYES | {"parameters": {"cache.budget": {"min": 1, "max": 7}}}, *SMALL))
    with pytest.raises(ConfigError, match=r"cache\.buget"):
        check(sweep_of(tmp_path, with_parameters(cache__buget={"values": [7]}), *SMALL))


def test_a_file_cannot_name_a_service_that_the_command_line_does_not_trust(tmp_path):
    service = {"reward": {"value": "endpoint"}, "reward.functions.custom.url": {"value": "http://there/"}}
    content = GRID | {"parameters": GRID["parameters"] | service}
    with pytest.raises(ConfigError, match="trusted_modules"):
        check(sweep_of(tmp_path, content, *SMALL))
    with trusting([]):  # until the end of the block
        check(sweep_of(tmp_path, content, *SMALL, "trusted_modules=['http://there/']"))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(Path("sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_combination_of_a_shipped_file_passes_the_checks(path):
    check(read_sweep(path))
