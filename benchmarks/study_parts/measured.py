"""Tables of what was measured beside the study's runs: seconds, gradients, and what eviction touches.

Nothing here is measured again: what fit was told is in each row, and benchmarks/study.py at commit 6ed54fc
has the blocks `timing`, `variance` and `exposure`.
"""

import statistics
from collections.abc import Mapping, Sequence

import record
from study_parts.analysis import mean_sd, place
from study_parts.plan import MAIN_ARMS, Setting

from lit_rlkv.reporting.tables import markdown_table

TIMING, VARIANCE, EXPOSURE = "study_timing", "study_variance", "study_exposure"


def rounds() -> list[dict]:
    """Return the seconds of an iteration of every arm, a row for each round of all arms in turn."""
    return record.rows(TIMING)


def seconds_of(setting: Setting) -> float:
    """Return the seconds of a whole iteration of an arm, the median over rounds."""
    return _median(setting.name, rounds())


def _median(name: str, rounds: Sequence[Mapping]) -> float:
    return statistics.median(sum(row["seconds"][name]) for row in rounds)


def timing_table(rounds: Sequence[Mapping]) -> str:
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


def variance_table(rows: Sequence[dict]) -> str:
    """Each arm's gradient of the whole loss on the same rollouts of one SFT model.

    Means ± standard deviations over seeds; variances in units of naive's, by seed.
    """
    naive = {place(row): row["variance"] for row in rows if row["arm"] == "naive"}
    headings = [
        "arm",
        "seeds",
        "variance / naive's",
        "signal / variance",
        "rejected, %",
        "added by reweighting / naive's",
    ]
    body = []
    for arm in MAIN_ARMS:
        mine = [row for row in rows if row["arm"] == arm and place(row) in naive]
        if not mine:
            continue
        cells = (
            [row["variance"] / naive[place(row)] for row in mine],
            [row["signal"] / row["variance"] for row in mine],
            [100 * row["masked_fraction"] for row in mine],
            [row["reweighting"] / naive[place(row)] for row in mine],
        )
        body.append([f"`{arm}`", str(len(mine)), *(_cell(values, 2) for values in cells)])
    return markdown_table(headings, body)


def sample_sizes(rows: Sequence[dict]) -> str:
    """Return the share of the compressed rollouts that the weights keep."""
    mine = [row for row in rows if row["arm"] == "naive"]
    listed = [
        f"{name.removeprefix('ess_')} {_cell([row[name] for row in mine if row[name] is not None], 3)}"
        for name in mine[0]
        if name.startswith("ess_")
    ]
    return f"effective sample size, share of 1: {', '.join(listed)}"


def _cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def exposure_table(rows: Sequence[dict]) -> str:
    """Share of an SFT model's tokens that eviction can affect; keys are of a layer and head."""
    headings = ["task", "budget", "actions a response", "after an eviction", "of all, %"]
    headings += ["keys: room", "that the longest response reads", "room of a full cache"]
    body = [
        [
            row["task"],
            str(row["budget"]),
            f"{row['mean_length']:.1f}",
            f"{row['affected'] * row['mean_length']:.1f}",
            f"{100 * row['affected']:.0f}",
            *(f"{row[name]}" for name in ("n_slots", "n_needed", "n_full")),
        ]
        for row in rows
    ]
    return markdown_table(headings, body)
