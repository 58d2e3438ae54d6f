"""One run of the study as a process, and the row that is kept of it."""

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import fit_process
import record
from study_parts.plan import Setting

NAME = "study"
SFT = ("sft.batch_size=128", "sft.n_pairs=32")
"""Settings of every recorded run; they were the defaults then."""
OVERLAP = "kv/overlap_p05/"
N_LAST = 10
"""Iterations whose mean stands for the end of a run."""


def finished(name: str = NAME) -> dict[str, dict]:
    """Rows of a file of results, by what fit was told."""
    return {key(row["overrides"]): row for row in record.rows(name)}


def key(overrides: list[str]) -> str:
    return " ".join(sorted(overrides))


def run(setting: Setting, runs_dir: Path) -> dict:
    """Train and evaluate; the row is on disk when this returns."""
    row = {
        **asdict(setting),
        "name": setting.name,
        "overrides": setting.overrides,
        **found(fit(setting.folder, setting.overrides, runs_dir), setting.budget),
    }
    record.append(NAME, row)
    return row


def found(folder: Path, budget: int) -> dict:
    """Return the measurements of a finished run."""
    return {**evaluation(folder, budget), **training(folder)}


def run_sft(setting: Setting, runs_dir: Path) -> None:
    """Leave the SFT model that the runs of this task and seed start from; quick where there is one."""
    fit(f"{setting.folder}-warm", [*setting.overrides, "stages=[sft]"], runs_dir)


def fit(name: str, overrides: list[str], runs_dir: Path) -> Path:
    """One process of fit, in a folder of its own."""
    return fit_process.fit(runs_dir / "study" / name, runs_dir, [*SFT, *overrides])


def evaluation(folder: Path, budget: int) -> dict:
    """Accuracy, mismatch and cache bytes, dense and under the run's budget."""
    found = json.loads((folder / "evaluation.json").read_text())
    row: dict = {}
    for moment in ("before", "after"):
        by_budget = {result["budget"]: result for result in found[moment]}
        for view, kept in (("dense", None), ("sparse", budget)):
            result = by_budget.get(kept)
            names = ("accuracy", "kl", "replay_gap", "kv_bytes")
            row |= {f"{view}_{name}_{moment}": None if result is None else result[name] for name in names}
    return row


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """One row per iteration."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def training(folder: Path) -> dict:
    """The reward of each iteration with the time so far, and means over the run."""
    history = read_metrics(folder)

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in history if row.get(name)]

    def mean(name: str) -> float | None:
        values = column(name)
        return statistics.mean(values) if values else None

    return {
        "rewards": [round(value, 4) for value in column("reward")],
        "rollout_seconds": sum(column("time/data")),
        "update_seconds": sum(column("time/update")),
        "masked_fraction": mean("rollout_corr/rollout_rs_masked_fraction"),
        "grad_norm": mean("grad_norm"),
        "entropy_last": statistics.mean(column("entropy")[-N_LAST:]),
        "train_kv_bytes": mean("kv/bytes"),
        "overlap_p05": lowest_overlaps(history),
    }


def lowest_overlaps(history: Sequence[Mapping[str, str]]) -> list[float]:
    """Return the lowest `kv/overlap_p05/{position}` of each iteration that measured it."""
    by_row = ([float(row[name]) for name in row if name.startswith(OVERLAP) and row[name]] for row in history)
    return [min(found) for found in by_row if found]
