import csv
import io

import pytest
from rich.console import Console

from lit_rlkv.sweeping.results import FIGURES, mean_sd, results_table, write_results
from tests.sweeping.files import BAYES, GRID
from tests.sweeping.test_runs import ENDS, all_values, end, study_of

BUDGETS = {"values": [5, 6, 7, 8]}


def printed(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_value_has_no_deviation_and_several_have_that_of_a_sample():
    assert mean_sd([0.5]) == "0.5"
    assert mean_sd([1.0, 2.0, 3.0]) == "2 ± 1"
    assert mean_sd([]) == "–"


def test_the_table_has_means_over_seeds_and_the_best_first(tmp_path):
    study = study_of(tmp_path)
    all_values(study)  # accuracy 0 and 0.2 at budget 5, 0.1 and 0.3 at 7
    heading, *rows = printed(results_table(study.sweep, study.ended()))
    assert heading == ["cache.budget", "runs", "eval/accuracy"]
    assert [row[:3] for row in rows] == [["7", "2", "0.2"], ["5", "2", "0.1"]]


@pytest.mark.parametrize("ends", [ENDS, (float("nan"),) * 4])
def test_runs_without_a_value_are_last_and_not_drawn(tmp_path, ends):
    content = GRID | {"parameters": GRID["parameters"] | {"seed": {"values": [0]}, "cache.budget": BUDGETS}}
    study = study_of(tmp_path, content)
    for run, value in zip(study.unfinished(), ends, strict=True):
        study.finish(end(run, value))
    _, *rows = printed(results_table(study.sweep, study.ended()))
    best = ["8", "6", "5", "7"] if ends is ENDS else ["5", "6", "7", "8"]
    assert [row[0] for row in rows] == best
    assert rows[-1][:3] == [best[-1], "1", "–"]
    files = write_results(study)
    assert [path.name for path in files] == ["results.csv", *(FIGURES if ends is ENDS else [])]
    assert len(list(csv.DictReader(files[0].open()))) == 4


def test_all_runs_are_written_and_drawn(tmp_path):
    for content in (None, BAYES):
        folder = tmp_path / str(content is None)
        folder.mkdir()
        study = study_of(folder, *([] if content is None else [content]))
        values = all_values(study)
        files = write_results(study)
        rows = list(csv.DictReader(files[0].open()))
        assert [tuple(row[key] for key in study.sweep.space) for row in rows] == values
        assert [path.name for path in files[1:]] == list(FIGURES)
        assert all(path.stat().st_size > 5000 for path in files[1:])
