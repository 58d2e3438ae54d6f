"""Each arm's gradient on the same rollouts of one model: variance, signal, what weights leave of the data.

Of the whole loss: the policy's term alone is the same in `shadow`, `smd` and `smd_dense`.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import record
from study_parts import runs
from study_parts.analysis import place
from study_parts.plan import ARMS, BUDGETS, MAIN_TASK, SEEDS, TASKS

from lit_rlkv.reporting.tables import markdown_table

NAME = "study_variance"
VARIANCE_ARMS = ("dense", "naive", "tis", "mis", "sparse_rl", "shadow", "smd", "smd_dense")
N_ROLLOUTS = 8
METRICS = {
    "variance": "gradient/loss/variance",
    "signal": "gradient/loss/signal",
    "sampling": "gradient/sources/sampling",
    "rewards": "gradient/sources/rewards",
    "reweighting": "gradient/sources/reweighting",
    "masked_fraction": "rollout_corr/rollout_rs_masked_fraction",
    "kl": "rollout_corr/k3_kl",
    "dense_kl": "kv/dense_k3_kl",
    "ess_token": "kv/arms/token_ratio/ess",
    "ess_sequence": "kv/arms/sequence_ratio/ess_seq",
    "ess_tis": "kv/arms/tis/ess",
    "ess_mis": "kv/arms/mis/ess",
    "ess_sparse_rl": "kv/arms/sparse_rl/ess",
}


def overrides(arm: str, seed: int) -> list[str]:
    """A run that learns nothing, so that every iteration is one more rollout of the SFT model.

    The sampler's random numbers depend on seed and iteration alone: arms that evict see the same rollouts.
    """
    return [
        *ARMS[arm],
        *TASKS[MAIN_TASK],
        f"cache.budget={BUDGETS[MAIN_TASK]}",
        f"seed={seed}",
        "stages=[sft,rl]",
        f"optimizer.lr={runs.STANDS_STILL}",
        f"algorithm.n_iterations={N_ROLLOUTS}",
        "callbacks.checkpoint_every=100000",
        "diagnostics.layers=null",
        "diagnostics.cache=null",
        "diagnostics.mismatch.every=1",
        "diagnostics.gradient.every=1",
        "diagnostics.gradient_sources.every=1",
    ]


def missing() -> list[tuple[str, int]]:
    done = runs.finished(NAME)
    pairs = [(arm, seed) for seed in SEEDS for arm in VARIANCE_ARMS]
    return [pair for pair in pairs if runs.key(overrides(*pair)) not in done]


def run(arm: str, seed: int, runs_dir: Path) -> dict:
    """Means over the rollouts; a metric that the arm does not have is None."""
    told = overrides(arm, seed)
    history = runs.read_metrics(runs.fit(f"variance-{arm}-{seed}", told, runs_dir))
    row: dict = {"arm": arm, "seed": seed, "overrides": told}
    for name, metric in METRICS.items():
        values = [float(line[metric]) for line in history if line.get(metric)]
        row[name] = statistics.mean(values) if values else None
    record.append(NAME, row)
    return row


def table(rows: Sequence[dict]) -> str:
    """Means ± standard deviations over seeds; variances in units of naive's, by seed."""
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
    for arm in VARIANCE_ARMS:
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
        for name in METRICS
        if name.startswith("ess_")
    ]
    return f"effective sample size, share of 1: {', '.join(listed)}"


def _cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
