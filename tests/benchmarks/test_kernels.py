"""kernels.py as users run it, at toy size; its gates and formulas stand in tests of their own."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import kernels
import pytest
import record
import torch
from kernel_parts import run as kernel_run
from kernel_parts import tune as kernel_tune
from kernel_parts.accuracy import WrongKernelError
from kernel_parts.case import Arm, Case, Setting
from kernel_parts.decode import cases as decode_cases
from kernel_parts.shadow import cases as shadow_cases
from kernel_parts.timing import Ceilings
from time_limit import TimeLimit

from tests.tiers import slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOT_LOADED = ("hydra", "omegaconf", "wandb", "peft", "lightning", "pytorch_lightning", "matplotlib")
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"


def loaded_by(code: str) -> set[str]:
    """Return the packages above that a fresh interpreter has loaded after this code."""
    report = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); {code}; {report}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split()) & set(NOT_LOADED)


@pytest.mark.parametrize(
    "script",
    [
        slow("kernels, kernel_parts.run, kernel_parts.tune"),
        slow("learner, kernel_parts.learner"),
        slow("rollout"),
    ],
)
def test_the_scripts_need_neither_hydra_nor_wandb(script: str):
    assert loaded_by(f"import {script}") == set()


@pytest.mark.slow
def test_a_run_prints_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    asked = f"--size toy --device {DEVICE} --ops token_logps --only 24 --rounds 1 --record"
    results = kernel_run.run(kernels.parse_arguments(asked.split()))
    printed = capsys.readouterr().out
    for result in results:
        assert result.label in printed
        assert all(arm.seconds.median > 0 for arm in result.arms)
    assert ("TIMED IS THE PLAIN DEFINITION" in printed) is not HAS_CUDA
    rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == [result.label for result in results]
    assert rows[0]["timed"] == ("triton" if HAS_CUDA else "reference")
    assert rows[0]["ceilings"]["copy_gb_per_s"] > 0


def test_a_wrong_kernel_is_refused_and_the_other_cases_are_measured(tmp_path, monkeypatch, capsys):
    def wrong() -> float:
        raise WrongKernelError("off by 5")

    def cases(setting: Setting):
        for label, check in (("first", wrong), ("second", lambda: 1.0)):
            arms = (Arm("ours", lambda: torch.ones(3)),)
            yield label, partial(Case, op="evict", label=label, sizes={}, arms=arms, check=check)

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(kernel_run, "ceilings", lambda device: Ceilings(1.0, 1.0))
    monkeypatch.setitem(kernel_run.CASES, "evict", cases)
    asked = kernels.parse_arguments(["--device", "cpu", "--ops", "evict", "--rounds", "1", "--record"])
    for n_rows in (2, 3):  # started again, it measures what was refused once more
        with pytest.raises(SystemExit, match="evict, first: refused: off by 5"):
            kernel_run.run(asked)
        rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
        assert len(rows) == n_rows
    assert [row["label"] for row in rows] == ["first", "second", "first"]
    assert (rows[0]["reason"], rows[0]["out_of_memory"]) == ("off by 5", False)
    assert [arm["name"] for arm in rows[1]["arms"]] == ["ours"]
    assert "evict: largest error 1.00" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_of_the_readme_runs():
    asked = "benchmarks/kernels.py --device cpu --rounds 1 --ops shadow_attention evict --only"
    command = [sys.executable, *asked.split(), "1"]  # budget 16; 1 row due
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "96 tokens, budget 16: queries see" in done.stdout
    assert "of the decode attention between two compactions" in done.stdout


def test_sizes_are_toys_where_kernels_are_interpreted():
    assert kernels.parse_arguments(["--device", "cpu"]).size == "toy"
    assert kernels.parse_arguments(["--device", "cuda"]).size == "real"


def test_past_the_limit_no_candidate_is_tried():
    setting = Setting(DEVICE, is_toy=True, n_rounds=1)
    label, build = next(decode_cases(setting))
    tuned = kernel_tune.tune("decode_attention", label, build, setting, TimeLimit(minutes=0.0))
    assert tuned.seconds.keys() == {kernel_tune.AS_IT_IS}
    assert set(tuned.problems.values()) == {"no time left"}


@pytest.mark.slow
def test_a_case_is_measured_once_unless_asked_again_or_the_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    asked = f"--size toy --device {DEVICE} --ops decode_attention --rounds 1 --record --only".split()
    n_rows = []
    for rest in (["33"], ["33"], ["33", "--again"], ["64", "--minutes", "0"]):
        kernel_run.run(kernels.parse_arguments([*asked, *rest]))
        n_rows.append(len(record.rows("kernels")))
    assert n_rows == [1, 1, 2, 2]
    printed = capsys.readouterr().out
    assert "batch 2, 33 slots: in the record already" in printed
    assert "batch 2, 64 slots: no time left" in printed


def test_tuning_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        kernels.parse_arguments(["--device", "cpu", "--tune"])
    assert "--tune times compiled kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "cases", "kept"), [("decode_attention", decode_cases, 3), ("shadow_attention", shadow_cases, 2)]
)
def test_other_configurations_are_right_too_and_leave_no_trace(op, cases, kept, monkeypatch):
    setting = Setting(DEVICE, is_toy=True, n_rounds=1)
    candidates = list(kernel_tune.CANDIDATES[op]())[:: 14 // kept][:kept]
    before = [{name: getattr(c.module, name) for name in c.values} for c in candidates]
    monkeypatch.setitem(kernel_tune.CANDIDATES, op, lambda: candidates)
    label, build = next(cases(setting))
    tuned = kernel_tune.tune(op, label, build, setting, TimeLimit())
    table, row = str(tuned), tuned.row()
    assert row["seconds"].keys() == {kernel_tune.AS_IT_IS, *(candidate.name for candidate in candidates)}
    assert row["fastest_over_as_it_is"] <= 1.0
    for candidate in candidates:
        assert candidate.name in table
        assert f"  {candidate.name}: " not in table  # which would say why it is out
    assert [{name: getattr(c.module, name) for name in c.values} for c in candidates] == before


def test_a_wrong_configuration_is_out():
    def wrong(*arguments):
        raise RuntimeError("out of resource: shared memory")

    setting = Setting(DEVICE, is_toy=True, n_rounds=1)
    candidate = kernel_tune.Candidate("too large", kernel_tune.decode_kernel, {"plan": wrong})
    _, build = next(decode_cases(setting))
    assert "out of resource" in (kernel_tune.find_problem(build(), candidate, setting) or "")


def test_an_arm_without_work_has_no_share():
    assert Arm("plan", print).work is None
