"""A full disk ends every command line in one line; what is saved stays, and a run can be resumed."""

from pathlib import Path
from shutil import copytree

import pytest

from lit_rlkv import evaluate, export, files, fit, report
from tests import forks
from tests.whole_runs import TINY

resource = pytest.importorskip("resource")

SFT = [*TINY, "diagnostics=none", "sft.n_steps=4", "sft.reward_steps=2", "sft.steps_per_iteration=2"]
SFT += ["evaluation.n_prompts=2", "evaluation.n_mismatch=2", "evaluation.budgets=[]"]


def ended(command, arguments, full_from="", n_bytes=0):
    """Run a command line in a fork; return its exit code and what it said.

    Once a file or folder is written whose path has `full_from` in it, no file can grow beyond `n_bytes`.
    """
    beside = files._beside

    def beside_or_full(path, ending):
        if full_from and full_from in str(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return beside(path, ending)

    return forks.ended(command.main, *arguments, before=lambda: setattr(files, "_beside", beside_or_full))


def check_one_line(code, said, text="File too large"):
    """Check that a command line has failed with one line that names the cause."""
    assert code == 1, said
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert text in line
    assert said.endswith(f"{line}\n")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "full_from"),
    [
        *(("[sft]", name) for name in ("config.yaml", "environment.json", "choices.json", "metrics.csv")),
        *(("[sft]", name) for name in ("iteration-000001", "pass-1", "sft_models", "backbone")),
        ("[sft,eval]", "evaluation.json"),
        ("[sft,eval]", "report.html"),
    ],
)
def test_a_run_without_rl_ends_in_one_line_on_a_full_disk_and_is_resumed(tmp_path, stages, full_from):
    folder = tmp_path / "run"
    arguments = [
        *SFT,
        "sft.joint=false",
        f"stages={stages}",
        f"runs_dir={tmp_path}",
        f"hydra.run.dir={folder}",
    ]
    # Models are linked into their folder, so there tokenizer.json is the first file that does not fit.
    code, said = ended(fit, arguments, full_from, n_bytes=1000 if full_from == "sft_models" else 0)
    check_one_line(code, said, "error: the disk is full: ")
    assert not list(tmp_path.rglob("*.partial*"))
    assert not (folder / "report.html").exists()
    saved = contents(tmp_path)
    is_begun = (folder / "config.yaml").is_file()
    assert ("resume with python -m lit_rlkv.fit resume=" in said) == is_begun
    code, said = ended(fit, [f"resume={folder}"] if is_begun else arguments)
    assert (code, "Traceback" in said) == (0, False), said
    assert (folder / "report.html").is_file()
    assert (folder / "backbone" / "config.json").is_file()
    models = {path for path in saved if path.suffix == ".safetensors" and "checkpoints" not in path.parts}
    kept = {path.read_bytes() for path in (folder / "backbone").rglob("*.safetensors")}
    assert {saved[path] for path in models} <= kept  # no finished pass is trained again


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of the SFT stage alone."""
    runs = tmp_path_factory.mktemp("runs")
    code, said = ended(fit, [*SFT, "stages=[sft]", f"runs_dir={runs}", f"hydra.run.dir={runs / 'run'}"])
    assert code == 0, said
    return runs / "run"


@pytest.mark.slow
def test_an_evaluation_on_a_full_disk_shows_its_results_and_leaves_those_of_an_earlier_one(trained, tmp_path):
    run_dir = Path(copytree(trained, tmp_path / "run"))
    arguments = [f"ckpt={run_dir}", "budgets=[]", "n_prompts=2"]
    assert ended(evaluate, arguments)[0] == 0
    before = contents(tmp_path)
    assert {path.name for path in before} > {"evaluate.json", "evaluate_samples.jsonl"}
    size = (run_dir / "evaluate_samples.jsonl").stat().st_size
    assert size < (run_dir / "evaluate.json").stat().st_size
    for name, n_bytes in [("evaluate.json", size), ("evaluate_samples.jsonl", 0)]:
        code, said = ended(evaluate, [*arguments, "n_samples=2", "temperature=1.5"], name, n_bytes)
        check_one_line(code, said)
        assert "random 7+2" in said
        after = contents(tmp_path)
        # The samples are written first, and each file as a whole.
        changed = {path.name for path in before if after[path] != before[path]}
        assert changed == ({"evaluate_samples.jsonl"} if name == "evaluate.json" else set())
        before = after
        assert not list(tmp_path.rglob("*.partial*"))


@pytest.mark.slow
def test_an_export_on_a_full_disk_leaves_nothing_and_an_earlier_one_as_it_was(trained, tmp_path):
    arguments = [f"ckpt={trained}", f"to={tmp_path / 'out'}"]
    sizes = (0, 1000, 8000, 50_000)  # different libraries fail
    for n_bytes in sizes:
        check_one_line(*ended(export, arguments, "out", n_bytes))
        assert list(tmp_path.iterdir()) == []
    assert ended(export, arguments)[0] == 0
    before = contents(tmp_path)
    for n_bytes in sizes:
        check_one_line(*ended(export, [*arguments, "overwrite=true"], "out", n_bytes))
        assert contents(tmp_path) == before
    assert ended(export, [*arguments, "overwrite=true"])[0] == 0


@pytest.mark.slow
def test_a_report_on_a_full_disk_leaves_the_earlier_one(trained, tmp_path):
    run_dir, other = (Path(copytree(trained, tmp_path / name)) for name in ("run", "other"))
    before = contents(tmp_path)
    check_one_line(*ended(report, [str(run_dir)], "report.html"))
    check_one_line(*ended(report, [str(run_dir), str(other), f"to={tmp_path / 'page.html'}"], "page.html"))
    assert contents(tmp_path) == before
