"""Result files and table of a sweep."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.plan import Run
from lit_rlkv.sweeping.results import best_first, mean_sd, results_table, settings, write_results
from tests.sweeping.files import BAYES, GRID, plan_of, with_parameters

CONTENT = with_parameters(GRID, seed={"values": [0, 1]}, experiment={"values": ["naive", "smd"]})


def ended():
    """Two arms, two seeds; the second naive run failed."""
    found = [
        ({"seed": 0, "experiment": "naive"}, Outcome("finished", {"eval/accuracy": 0.5, "eval/kl": 0.2})),
        ({"seed": 0, "experiment": "smd"}, Outcome("finished", {"eval/accuracy": 0.8, "eval/kl": 0.1})),
        ({"seed": 1, "experiment": "naive"}, Outcome("failed", reason="ended with exit status 1")),
        ({"seed": 1, "experiment": "smd"}, Outcome("finished", {"eval/accuracy": 0.9, "eval/kl": 0.3})),
    ]
    return [(Run(i, values, Path(f"sweep/{i:04d}")), outcome) for i, (values, outcome) in enumerate(found)]


def test_seeds_are_averaged_and_nothing_else(tmp_path):
    naive, smd = settings(ended())
    assert (naive.values, naive.found("eval/accuracy")) == ({"experiment": "naive"}, [0.5])
    assert (smd.values, smd.found("eval/accuracy")) == ({"experiment": "smd"}, [0.8, 0.9])
    sweep = plan_of(tmp_path, CONTENT).sweep
    assert [setting.values["experiment"] for setting in best_first([naive, smd], sweep.metric)] == [
        "smd",
        "naive",
    ]


def test_means_carry_the_deviation_of_a_sample_with_two_digits():
    # 0.8 and 0.9: mean 0.85, deviation 0.1 / sqrt(2) = 0.0707
    assert mean_sd([0.8, 0.9]) == "0.850 ± 0.071"
    assert mean_sd([10.0, 30.0]) == "20 ± 14"
    assert mean_sd([0.5]) == "0.5"
    assert mean_sd([0.5, 0.5]) == "0.5 ± 0"
    assert mean_sd([]) == "–"


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 1.0], [math.inf, -math.inf], [math.nan]])
def test_a_run_that_came_to_nothing_is_not_averaged_away(values):
    assert mean_sd(values) in ("nan", "inf")


def test_a_setting_without_a_number_comes_last(tmp_path):
    broken = [(run, replace(how, metrics={"eval/accuracy": math.nan})) for run, how in ended()[1:2]]
    found = settings([*broken, *ended()[:1]])
    ranked = best_first(found, plan_of(tmp_path, CONTENT).sweep.metric)
    assert [setting.values["experiment"] for setting in ranked] == ["naive", "smd"]


def test_the_table_has_a_row_a_setting_and_says_what_failed(tmp_path):
    console = Console(width=120, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    console.print(results_table(plan_of(tmp_path, CONTENT).sweep, ended()))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["experiment", "runs", "eval/accuracy", "eval/kl"]
    assert lines[1] == ["naive", "1,", "1", "failed", "0.5", "0.2"]
    assert lines[2] == ["smd", "2", "0.850", "±", "0.071", "0.20", "±", "0.14"]


def test_a_search_is_listed_from_the_best_on(tmp_path):
    content = CONTENT | {"method": "random", "run_cap": 4}
    table = results_table(plan_of(tmp_path, content).sweep, ended())
    assert [str(cell) for cell in table.columns[0].cells] == ["smd", "naive"]


def test_every_run_is_in_both_files_with_its_folder(tmp_path):
    write_results(tmp_path, plan_of(tmp_path, CONTENT).sweep, ended())
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["folder"] for row in rows] == ["0000", "0001", "0002", "0003"]
    assert [row["state"] for row in rows] == ["finished", "finished", "failed", "finished"]
    assert [row["eval/accuracy"] for row in rows] == ["0.5", "0.8", "", "0.9"]
    assert [row["experiment"] for row in rows] == ["naive", "smd", "naive", "smd"]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[3]["metrics"]["eval/kl"] == pytest.approx(0.3)
    assert lines[2]["reason"] == "ended with exit status 1"
    assert not math.isnan(lines[0]["metrics"]["eval/accuracy"])


def test_parameters_come_first_then_the_metric_then_the_rest(tmp_path):
    write_results(tmp_path, plan_of(tmp_path, CONTENT).sweep, ended())
    heading = (tmp_path / "results.csv").read_text().splitlines()[0]
    assert heading == "seed,experiment,eval/accuracy,run,state,folder,eval/kl"


def test_a_parameter_that_is_named_like_a_metric_is_kept_beside_it(tmp_path):
    content = with_parameters(BAYES | {"method": "random"}, reward={"values": ["verifier", "mixed"]})
    sweep = plan_of(tmp_path, content).sweep
    found = [(Run(0, {"reward": "mixed"}, Path("0000")), Outcome("finished", {"reward": 0.5}, [0.5]))]
    write_results(tmp_path, sweep, found)
    with (tmp_path / "results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["parameters.reward"], row["reward"]) == ("mixed", "0.5")
    table = results_table(sweep, found)
    assert [str(column.header) for column in table.columns] == ["parameters.reward", "runs", "reward"]
