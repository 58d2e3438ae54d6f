import csv
import io

from rich.console import Console

from lit_rlkv.sweeping.results import FIGURES, mean_sd, results_table, write_results
from tests.sweeping.files import BAYES
from tests.sweeping.test_runs import all_values, study_of


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
