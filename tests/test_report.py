"""The command line that draws reports of run folders, here folders written by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest

from lit_rlkv import report
from lit_rlkv.interrupts import EXIT_CODE
from lit_rlkv.reporting.run_folder import read_run
from tests.reporting.reports import FULL, JUDGED, Page, write_run


@pytest.fixture
def run_report(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command line and returns its exit code, output and error."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
        try:
            report.main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    return call


def test_a_run_folder_is_read_as_it_was_written(tmp_path):
    whole = replace(FULL, title="a", reward_model=JUDGED, sft_history=[], diagnostics=[])
    assert read_run(write_run(tmp_path / "a", whole)) == whole


def test_a_run_that_has_only_begun_can_be_read(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("seed: 1\n")
    (tmp_path / "a/metrics.csv").write_text("iteration,reward\n1,0.5\n2,0.")  # the last row is being written
    found = read_run(tmp_path / "a")
    assert found.history == [{"iteration": 1.0, "reward": 0.5}]
    assert (list(found.before), list(found.samples), found.evictions) == ([], [], None)


def test_a_finished_run_gets_its_report_anew(tmp_path, run_report):
    folder = write_run(tmp_path / "a")
    (folder / "report.html").write_text("old")
    assert run_report(folder) == (0, f"report: {folder}/report.html\n")
    page = Page((folder / "report.html").read_text())
    assert page.count("figure") == 4
    assert "81.0% [73.3, 86.9]" in page.texts


def test_an_unfinished_run_gets_no_report_that_would_mark_it_as_complete(tmp_path, run_report):
    folder = write_run(tmp_path / "a")
    assert run_report(folder) == (0, f"report: {folder}/report_so_far.html\n")
    assert not (folder / "report.html").exists()


def test_a_page_that_would_mark_an_unfinished_run_as_complete_is_refused(tmp_path, run_report):
    folder = write_run(tmp_path / "a")
    (folder / "report.html").unlink(missing_ok=True)
    code, said = run_report(folder, f"to={folder}/report.html")
    assert (
        code
        == f"error: to={folder}/report.html would mark an unfinished run as complete; give another to=FILE"
    )
    assert said == ""


def test_two_runs_are_compared_on_one_page(tmp_path, run_report):
    folders = [write_run(tmp_path / name) for name in "ab"]
    assert run_report(*folders, "to=pages/ab.html") == (0, "comparison: pages/ab.html\n")
    page = Page((tmp_path / "pages/ab.html").read_text())
    assert "Comparison of 2 runs" in page.texts
    assert run_report(*folders) == (0, "comparison: comparison.html\n")


def test_mistakes_are_told_in_one_line(tmp_path, run_report):
    folder = write_run(tmp_path / "a")
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    cases = {
        ("other",): "error: other must be the folder of a run, and it has no config.yaml",
        (folder, "nothing"): "error: nothing must be the folder of a run",
        (folder, folder): "error: a run cannot be compared with itself",
        ("to=x.html",): "error: a report needs a run folder, got none",
        (folder, "to=x.html", "to=y.html"): "error: to= must be given once",
        (folder, "to=other"): "error: to=other must name a page",
        (
            folder,
            f"to={folder}/config.yaml",
        ): f"error: to={folder}/config.yaml must name a page",
        (folder, "to=file/x.html"): "error: file/x.html cannot be written",
        (folder, "at=x.html"): "error: at=x.html must be the folder of a run",
    }
    for arguments, message in cases.items():
        code, printed = run_report(*arguments)
        assert str(code).startswith(message)
        assert "\n" not in code
        assert printed == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("evaluation.json", "{"),
        ("evaluation.json", '{"before": [{"cash": 1}]}'),
        ("metrics.csv", "iteration,reward\n1,much\n"),
        ("config.yaml", "a: [\n"),
        ("diagnostics.jsonl", "no json\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path, run_report, name, content):
    folder = write_run(tmp_path / "a")
    (folder / name).write_text(content)
    code, _ = run_report(folder)
    assert code.startswith(f"error: {folder / name} ")
    assert "\n" not in code


def test_help_and_no_arguments_print_the_usage(run_report):
    assert run_report("--help") == (0, report.USAGE)
    assert run_report() == (2, report.USAGE)


def test_ctrl_c_ends_it_without_a_traceback(tmp_path, run_report, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write", interrupt)
    assert run_report(write_run(tmp_path / "a")) == (EXIT_CODE, "")


def test_a_report_is_drawn_without_torch(tmp_path):
    folder = write_run(tmp_path / "a")
    code = "import sys; from lit_rlkv import report; report.main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    assert "matplotlib" in imported
    assert not {"torch", "transformers", "lightning"} & set(imported)
