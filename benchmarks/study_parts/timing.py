"""Seconds of an iteration by arm: all arms in turn, round after round, on an otherwise idle machine."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import record
from study_parts import runs
from study_parts.analysis import mean_sd, processor
from study_parts.plan import Setting, timed

from lit_rlkv.reporting.tables import markdown_table

NAME = "study_timing"
N_ROUNDS = 3


def measured() -> list[dict]:
    """Rounds of the first kind of processor that has all, so that more of them change no plan of `clock`."""
    of_all = _by_processor().values()
    return next((rows for rows in of_all if len(rows) >= N_ROUNDS), next(iter(of_all), []))


def n_missing() -> int:
    """Rounds that this kind of processor has still to run."""
    return N_ROUNDS - len(_by_processor().get(processor(record.provenance()), ()))


def _by_processor() -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for row in record.rows(NAME):
        found.setdefault(processor(row), []).append(row)
    return found


def run_round(runs_dir: Path) -> dict:
    """Every arm once. Of the iterations the median, which neither the first one nor a hiccup moves."""
    runs.run_sft(timed()[0], runs_dir)
    seconds = {setting.name: _timed(setting, runs_dir) for setting in timed()}
    row = {"overrides": {setting.name: _overrides(setting) for setting in timed()}, "seconds": seconds}
    record.append(NAME, row)
    return row


def _overrides(setting: Setting) -> list[str]:
    return [*setting.overrides, "stages=[sft,rl]"]


def _timed(setting: Setting, runs_dir: Path) -> list[float]:
    """Return the seconds of rollout with scoring, and of the update."""
    history = runs.read_metrics(runs.fit(f"timing-{setting.folder}", _overrides(setting), runs_dir))
    return [statistics.median(float(line[name]) for line in history) for name in ("time/data", "time/update")]


def seconds_of(setting: Setting, rounds: Sequence[Mapping]) -> float:
    """Return the seconds of a whole iteration of an arm, the median over rounds.

    Raises:
        LookupError: rounds are missing.
    """
    if len(rounds) < N_ROUNDS:
        raise LookupError(f"{len(rounds)} of {N_ROUNDS} rounds of `timing` have been run")
    return _median(setting.name, rounds)


def _median(name: str, rounds: Sequence[Mapping]) -> float:
    return statistics.median(sum(row["seconds"][name]) for row in rounds)


def table(rounds: Sequence[Mapping]) -> str:
    """Means ± standard deviations over rounds; ratios are of arms of one round. `clock` takes the medians."""
    headings = ["arm", "rollout and scoring, s", "update, s", "both, of naive's", "both, median, s"]
    body = []
    for name in rounds[0]["seconds"]:
        mine = [row["seconds"][name] for row in rounds]
        ratios = [sum(row["seconds"][name]) / sum(row["seconds"]["naive"]) for row in rounds]
        rollout, update = zip(*mine, strict=True)
        spreads = [mean_sd(values, 1, 2) for values in (rollout, update, ratios)]
        body.append([f"`{name}`", *spreads, f"{_median(name, rounds):.3f}"])
    return markdown_table(headings, body)
