"""gpu.py: its targets, its stages, and the whole path at toy size where packages are missing."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import gpu
from gpu_parts import page, stages
from gpu_parts.stages import (
    FIRST_TESTS,
    OF_RUNS,
    REAL,
    ROWS,
    TITLES,
    commands,
    pytest_command,
    run_command,
)
from gpu_parts.targets import ROLLOUT, Figure, figures

ROOT = Path(__file__).parents[2]
LENT_MACHINE = Path(__file__).parent / "lent_machine"


def on_a_lent_machine(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python where neither this project nor Hydra, W&B, peft, lightning or beartype are installed."""
    paths = os.pathsep.join(map(str, (LENT_MACHINE, ROOT, ROOT / "benchmarks")))
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def arm(name: str, median: float, **entries) -> dict:
    return {"name": name, "seconds": {"median": median}, "share_of_ceiling": None, **entries}


def by_name(stage: str, records: dict) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures([stage], records)}


def test_shares_and_ratios_are_read_off_the_rows_and_judged():
    decode = arm("scores added up", 1.0, share_of_ceiling=0.79)
    rows = [
        {"op": "decode_attention", "label": "batch 64, 2048 slots", "arms": [decode]},
        {
            "op": "shadow_attention",
            "label": "16384 tokens, budget 1024",
            "arms": [arm("shadow", 2.0), arm("shadow and its plan", 2.5), arm("dense flash", 9.0)],
        },
    ]
    decode_figure = by_name("B", {"kernels": rows})["decode with scores, 2048 slots, share of copy bandwidth"]
    assert (decode_figure.value, decode_figure.verdict) == (0.79, "missed")
    found = by_name("K", {"kernels": rows})
    name = "shadow attention, 16384 tokens, budget 1024, speed over"
    assert (found[f"{name} torch's dense flash"].value, found[f"{name} torch's dense flash"].verdict) == (
        4.5,
        "met",
    )
    assert found[f"{name} dense flash, plan included"].value == 3.6
    assert found[f"{name} dense cuDNN"].verdict == "not measured"
    assert found["shadow attention, 16384 tokens, budget 1024: shadow"].value == 2000.0
    refused = {"op": "evict", "label": "64 rows", "reason": "off by 5", "out_of_memory": False}
    wrong = {**rows[0], "reason": "off by 9", "out_of_memory": False}
    del wrong["arms"]
    found = by_name("B", {"kernels": [*rows, refused, wrong]})
    assert found["evict, 64 rows: refused: off by 5"].value is None
    assert found["decode with scores, 2048 slots, share of copy bandwidth"].verdict == "not measured"


def test_a_test_counts_by_its_last_outcome():
    rows = [{"test": "a", "outcome": "failed"}, {"test": "b", "outcome": "passed"}]
    assert by_name("A", {"tests": rows})["tests that failed"].verdict == "missed"
    found = by_name("A", {"tests": [*rows, {"test": "a", "outcome": "passed"}]})
    assert (found["tests that passed"].value, found["tests that failed"].verdict) == (2, "met")
    assert by_name("A", {})["tests that failed"].verdict == "not measured"


def test_the_speed_of_the_rollout_has_a_target_on_an_h100_alone():
    ours = {**ROLLOUT, "tokens_per_s": 29_000.0, "integrated": False, "compile_layers": False}
    for device, verdict in (("NVIDIA H100 80GB HBM3", "missed"), ("NVIDIA H200", "")):
        assert by_name("C", {"rollout": [ours | {"device": device}]})["rollout"].verdict == verdict


def test_a_learner_out_of_memory_is_named():
    failed = [{"name": "torch dense", "reason": "full", "out_of_memory": True}]
    arms = [arm("shadow 1024, triton", 2.0), arm("shadow 1024, reference", 9.0)]
    rows = [
        {"asked": {"tokens": 8}, "arms": arms, "failed": failed},
        {"asked": {"tokens": 16}, "out_of_memory": True, "reason": "full"},
        {"asked": {"tokens": 32}, "out_of_memory": False, "reason": "off by 5"},
    ]
    found = by_name("D", {"learner": rows})
    assert {name.removeprefix("learner's step, ") for name in found} == {
        "8 tokens, shadow 1024, triton, speed over torch's dense",
        "8 tokens, shadow 1024, reference, speed over torch's dense",
        "8 tokens, torch dense: out of memory",
        "16 tokens: out of memory",
        "32 tokens: refused: off by 5",
    }
    assert {figure.verdict for figure in found.values()} == {"not measured"}


def test_a_peak_of_memory_is_that_of_the_latest_row():
    row = {"case": "qwen3", "phase": "update", "measured": 1_000_000}
    found = by_name("M", {"plan_peaks": [row, row | {"measured": 4_000_000}]})
    assert found["qwen3: update"].value == 4


def test_make_takes_the_machines_own_python_and_builds_no_environment():
    # Under `make test` the inner make would tell which folder it enters, too.
    command = ["make", "--no-print-directory", "-n", "gpu", "PYTHON=python3", "ARGS=--out x --stages A"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "python3 benchmarks/gpu.py --out x --stages A\n"


def test_every_stage_has_figures_and_commands_of_scripts_that_exist():
    assert all(by_name(stage, {}) for stage in TITLES)
    scripts = {command.split()[0] for stage in REAL.values() for command in stage}
    assert all((ROOT / "benchmarks" / script).is_file() for script in scripts)
    assert set(TITLES) == {*REAL, "T", "A"}


def collected(*command: str) -> set[str]:
    """Return the files of the tests that pytest chooses."""
    done = on_a_lent_machine(*command, "--collect-only", ABSENT_PACKAGES="")
    return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}


def files_of(stage: str) -> set[str]:
    """Return the files of the tests of a stage."""
    every = (command for group in commands(stage, is_toy=False) for command in group)
    return {part for command in every for part in command if part.startswith("tests/")}


def test_every_gpu_test_is_in_a_stage():
    found = collected(*pytest_command(["tests"], "gpu")[1:])
    assert len(found) > 20
    assert found == files_of("A")
    assert files_of("T") < found


def test_the_first_stage_chooses_tests_that_exist():
    chosen = {file: only for files, only in FIRST_TESTS.items() for file in files}
    choice = (f"({Path(file).stem} and ({only or 'test'}))" for file, only in chosen.items())
    assert collected(*pytest_command([*chosen], "gpu", " or ".join(choice))[1:]) == set(chosen)


def test_a_command_that_takes_too_long_ends_as_by_ctrl_c():
    waits = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('kept')"
    assert run_command([sys.executable, "-c", waits], dict(os.environ), 2.0) == ("out of time", ["kept"])


def test_a_command_that_crashes_leaves_its_last_lines():
    outcome, lines = run_command([sys.executable, "-c", "1 / 0"], dict(os.environ), 60.0)
    assert outcome == "crashed"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert run_command([sys.executable, "-c", "exit(1)"], dict(os.environ), 60.0, (0, 1))[0] == "done"


LOSES_THE_DEVICE = """
from gpu_parts import pytest_rows

def test_that_loses_the_device():
    pytest_rows.is_device_lost = lambda: True
    assert False

def test_after_it():
    pass
"""


def test_a_test_that_loses_the_device_is_left_out_when_the_tests_are_started_again(tmp_path, monkeypatch):
    tests = tmp_path / "test_device.py"
    tests.write_text(LOSES_THE_DEVICE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_parts.pytest_rows", "-c", os.devnull]
    monkeypatch.setattr(
        stages, "commands", lambda *_, **__: [[[*command, "--rootdir", str(tmp_path), str(tests)]]]
    )
    ended = stages.run_stage("A", tmp_path, 5.0, is_toy=True)
    assert ended.outcome == "done"
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert [(row["test"].rpartition("::")[2], row["outcome"]) for row in rows] == [
        ("test_that_loses_the_device", "failed"),
        ("test_after_it", "passed"),
    ]


def test_a_stage_that_had_its_time_comes_after_those_that_had_not(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / ROWS))
    assert gpu.stages_left() == list(TITLES)
    for stage, outcome, had_all in (("T", "out of time", True), ("G", "done", True), ("R", "crashed", False)):
        gpu.write_page(tmp_path, stage, stages.Ended(outcome, 1.0, []), had_all=had_all, is_toy=True)
    assert gpu.stages_left() == [stage for stage in TITLES if stage not in "TG"] + ["T"]


def test_a_crashed_stage_shows_why_on_the_page():
    row = {"stage": "D", "outcome": "crashed", "seconds": 3.0, "last_lines": ["RuntimeError: no"]}
    shown = page.section("D", {"stages": [row]}, is_toy=False)
    assert "crashed after 3 s" in shown
    assert "RuntimeError: no" in shown
    assert "RuntimeError" not in page.section("D", {"stages": [row | {"outcome": "done"}]}, is_toy=False)


def test_the_whole_path_runs_at_toy_size_where_packages_are_missing(tmp_path: Path):
    for package in ("beartype", "hydra", "lightning", "peft", "wandb"):
        assert f"No module named '{package}'" in on_a_lent_machine("-c", f"import {package}").stderr
    done = on_a_lent_machine("benchmarks/gpu.py", "--out", str(tmp_path), "--toy")
    assert done.returncode == 0, done.stdout[-4000:]
    written = (tmp_path / "gpu.md").read_text()
    assert [stage for stage in TITLES if f"## {stage}: {TITLES[stage]}\n\ndone after" in written] == [
        stage for stage in TITLES if stage not in OF_RUNS
    ]
    assert done.stdout.count("left out: packages are missing: hydra, lightning") == len(OF_RUNS)
    assert "| tests that failed | 0 | at most 0 | toy |" in written
    assert {file.name for file in tmp_path.iterdir()} == {"gpu.jsonl", "gpu.log", "gpu.md"}
    rows: dict[str, list[dict]] = defaultdict(list)
    for line in (tmp_path / ROWS).read_text().splitlines():
        row = json.loads(line)
        rows[row["record"]].append(row)
    assert {row["outcome"] for row in rows["tests"]} == {"passed"}
    assert {row["op"] for row in rows["kernels"]} == {"decode_attention", "shadow_attention", "evict"}
    assert [row["integrated"] for row in rows["rollout"]] == [True, False]
    assert {row["dtype"] for row in rows["replay_gap"]} == {"bfloat16", "float32"}
    assert rows["learner"][0]["out_of_memory"] is False
    assert rows["profile"][0]["operations"]
    assert [row["stage"] for row in rows["stages"]] == list(TITLES)
    # From a copy of the rows: tests that passed and what was measured are not run again.
    n_tests, copied = len(rows["tests"]), tmp_path / "copied"
    copied.mkdir()
    shutil.copy(tmp_path / ROWS, copied)
    assert "==" not in on_a_lent_machine("benchmarks/gpu.py", "--out", str(copied), "--toy").stdout
    again = on_a_lent_machine("benchmarks/gpu.py", "--out", str(copied), "--toy", "--stages", "A", "B")
    assert again.returncode == 0, again.stdout[-4000:]
    assert "in the record already" in again.stdout
    lines = (copied / ROWS).read_text().splitlines()
    assert sum(json.loads(line)["record"] == "tests" for line in lines) == n_tests


def test_the_page_of_the_committed_run_is_written_anywhere():
    done = on_a_lent_machine("benchmarks/gpu.py", "--page", "benchmarks/results/gpu.jsonl")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "NVIDIA H100" in done.stdout
    assert "| tests that failed | 0 | at most 0 | met |" in done.stdout
    for judged in (
        "at least 0.8 | met",
        "at least 4 | missed",
        "at most 0.02 | missed",
        "at most 0.0001 | met",
    ):
        assert f"| {judged} |" in done.stdout
    # What docs/results/gpu.md says besides figures with a target.
    for figure in (
        *("8,064 MiB", "0.136", "16,360 MiB", "17 s", "21.2 s", "0.127", "0.106 nats", "18.7", "19.3"),
        *("6.13", "1.48", "0.904", "194 TFLOP/s", "138 TFLOP/s", "599 TFLOP/s", "574 ms", "54.4 GB"),
    ):
        assert f" {figure} |" in done.stdout, figure


def test_without_a_gpu_only_the_toy_runs(tmp_path: Path):
    done = on_a_lent_machine("benchmarks/gpu.py", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "torch sees no GPU; --toy runs the whole path at toy size on a CPU" in done.stderr
