"""How often the confidence intervals of accuracies, pass@k and gains cover the true value.

    python benchmarks/interval_coverage.py              simulates, records and prints; four minutes
    python benchmarks/interval_coverage.py --fast       a look at the output in seconds, records nothing
    python benchmarks/interval_coverage.py --report     prints what was recorded last

A prompt's chance of a right answer is drawn from a beta distribution: its mean is the accuracy, and the
correlation is that of two samples of a prompt. Beside the intervals of `evaluate` stands the percentile
bootstrap over prompts. A gain is a difference of two accuracies of one model, on the same problems, over a
few seeds, with the paired interval of docs/results/study.md. Rows go to
benchmarks/results/interval_coverage.jsonl.
"""

from collections.abc import Iterator
from math import exp, lgamma

import command_line
import numpy as np
import record
from text_table import text_table

from lit_rlkv.evaluation.estimates import pass_at_k
from lit_rlkv.evaluation.intervals import clustered_share, mean_interval

NAME = "interval_coverage"
N_PROMPTS = (64, 256, 1024)
ACCURACIES = (0.005, 0.02, 0.1, 0.5, 0.9, 0.98, 0.995)
CORRELATIONS = (0.0, 0.1, 0.3, 0.6, 0.9)
SAMPLES = {1: (1,), 4: (1, 2), 8: (1, 4)}
"""The k of pass@k by samples of a prompt; pass@1 is the accuracy."""
LEVEL = 0.95
N_RESAMPLES = 1000
LEAST = 0.93
"""Coverage below which a place is named."""


def chances(rng: np.random.Generator, p: float, correlation: float, n: int) -> np.ndarray:
    """Each prompt's chance of a right answer."""
    if correlation == 0:
        return np.full(n, p)
    scale = (1 - correlation) / correlation
    return rng.beta(p * scale, (1 - p) * scale, n)


def true_pass_at_k(p: float, correlation: float, k: int) -> float:
    """1 − E[(1 − chance)^k]."""
    if correlation == 0:
        return 1 - (1 - p) ** k
    scale = (1 - correlation) / correlation
    b = (1 - p) * scale
    return 1 - exp(lgamma(b + k) - lgamma(b) + lgamma(scale) - lgamma(scale + k))


def bootstrap(rng: np.random.Generator, values: np.ndarray) -> tuple[float, float]:
    """The percentile bootstrap over prompts, by how often each value is drawn."""
    kinds, counts = np.unique(values, return_counts=True)
    means = rng.multinomial(len(values), counts / len(values), N_RESAMPLES) @ kinds / len(values)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def coverage(true: float, intervals: list[tuple[float, float]]) -> dict[str, float]:
    """Share of the intervals that hold the true value, their mean width, the share without width."""
    low, high = np.array(intervals).T
    return {
        "coverage": float(np.mean((low <= true + 1e-12) & (true - 1e-12 <= high))),
        "width": float(np.mean(high - low)),
        "points": float(np.mean(high == low)),
    }


def share_cells(n_prompts: int, n_samples: int, n_runs: int, rng: np.random.Generator) -> Iterator[dict]:
    """Simulated evaluations of every accuracy and correlation."""
    for correlation in CORRELATIONS if n_samples > 1 else (0.0,):
        for p in ACCURACIES:
            drawn = [rng.binomial(n_samples, chances(rng, p, correlation, n_prompts)) for _ in range(n_runs)]
            for k in SAMPLES[n_samples]:
                table = np.array([pass_at_k(n_samples, right, k) for right in range(n_samples + 1)])
                ours = [clustered_share(table[right].tolist(), n_samples, LEVEL) for right in drawn]
                resampled = [bootstrap(rng, table[right]) for right in drawn[: max(n_runs // 4, 1)]]
                true = true_pass_at_k(p, correlation, k)
                yield {
                    "p": p, "correlation": correlation, "k": k, "true": true,
                    **coverage(true, [(one.low, one.high) for one in ours]),
                    "bootstrap": coverage(true, resampled),
                }  # fmt: skip


def gain_cells(n_seeds: int, n_runs: int, rng: np.random.Generator) -> Iterator[dict]:
    """Simulated gains over seeds: accuracy before and after on the same problems, each seed a model."""
    for n_problems in (256, 1024):
        for before, after, spread in (
            (0.5, 0.7, 0.05),
            (0.66, 0.86, 0.03),
            (0.98, 0.99, 0.004),
            (0.995, 0.99, 0.002),
        ):
            true, found = after - before, []
            for _ in range(n_runs):
                gains = []
                for _ in range(n_seeds):
                    start = np.clip(rng.normal(before, spread), 0, 1)
                    end = np.clip(rng.normal(after, spread), 0, 1)
                    hardness = rng.random(n_problems)  # of a problem, before and after
                    noise = rng.random(n_problems)
                    again = np.where(rng.random(n_problems) < 0.5, hardness, noise)
                    gains.append(float(np.mean(again < end) - np.mean(hardness < start)))
                one = mean_interval(gains, LEVEL)
                found.append((one.low, one.high))
            yield {
                "n_problems": n_problems, "before": before, "after": after, "spread": spread, "true": true,
                **coverage(true, found),
            }  # fmt: skip


def report(rows: list[dict]) -> str:
    """Tables of the lowest coverages, and each place below `LEAST`."""
    shares = [row for row in rows if row["kind"] == "share"]
    gains = [row for row in rows if row["kind"] == "gain"]
    body = []
    for row in shares:
        for k in SAMPLES[row["n_samples"]]:
            cells = [cell for cell in row["cells"] if cell["k"] == k]
            worst = min(cells, key=lambda cell: cell["coverage"])
            theirs = min(cells, key=lambda cell: cell["bootstrap"]["coverage"])["bootstrap"]["coverage"]
            body.append(
                [
                    str(row["n_prompts"]),
                    str(row["n_samples"]),
                    f"pass@{k}" if k > 1 else "accuracy",
                    f"{worst['coverage']:.3f} at p={worst['p']:g}, correlation {worst['correlation']:g}",
                    f"{np.mean([cell['coverage'] for cell in cells]):.3f}",
                    f"{np.mean([cell['width'] for cell in cells]):.3f}",
                    f"{theirs:.3f}",
                    f"{np.mean([cell['bootstrap']['width'] for cell in cells]):.3f}",
                    f"{max(cell['bootstrap']['points'] for cell in cells):.2f}",
                ]
            )
    headings = ["prompts", "samples", "of", "lowest coverage", "mean", "width"]
    headings += ["bootstrap: lowest", "width", "most points"]
    parts = [text_table(headings, body, n_left=4)]
    body = [
        [str(row["n_seeds"]), str(cell["n_problems"]), f"{cell['before']:g} → {cell['after']:g}",
         f"{cell['coverage']:.3f}", f"{cell['width']:.3f}"]
        for row in gains for cell in row["cells"]
    ]  # fmt: skip
    parts.append(text_table(["seeds", "problems", "gain", "coverage", "width"], body, n_left=3))
    low = [
        f"below {LEAST}: {row['n_prompts']} prompts, {row['n_samples']} samples, pass@{cell['k']}, "
        f"p={cell['p']:g}, correlation {cell['correlation']:g}: {cell['coverage']:.3f}"
        for row in shares
        for cell in row["cells"]
        if cell["coverage"] < LEAST
    ]
    return "\n\n".join([*parts, "\n".join(low) or f"Nowhere below {LEAST}."])


def simulated(n_runs: int) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = [
        {
            "kind": "share", "n_prompts": n_prompts, "n_samples": n_samples, "n_runs": n_runs,
            "cells": list(share_cells(n_prompts, n_samples, n_runs, rng)),
        }
        for n_prompts in N_PROMPTS
        for n_samples in SAMPLES
    ]  # fmt: skip
    return rows + [
        {"kind": "gain", "n_seeds": n, "n_runs": n_runs, "cells": list(gain_cells(n, n_runs, rng))}
        for n in (3, 5)
    ]


def latest(rows: list[dict]) -> list[dict]:
    """The last recorded row of each setting."""
    return list(
        {
            (row["kind"], row.get("n_prompts"), row.get("n_samples"), row.get("n_seeds")): row for row in rows
        }.values()
    )


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    if asked.report:
        print(report(latest(record.rows(NAME))))
        return
    rows = simulated(20 if asked.fast else 2000)
    if not asked.fast:
        for row in rows:
            record.append(NAME, row)
    print(report(rows))


if __name__ == "__main__":
    main()
