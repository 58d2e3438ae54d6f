"""recipe=smollm2 with several seeds: accuracy before and after RL, under its budget and with all keys.

    python scripts/fetch_model.py                                    fetches the model
    python benchmarks/smollm2.py --record [--seeds 0 1 2] [--runs-dir runs]
    python benchmarks/smollm2.py --report                        the table

One seed after another, each as `make smollm2 ARGS="seed=..."` would run it; a seed that has finished is not
run again. The minutes hold for a machine without other work. They include the SFT stage, unless the folder of
runs has its model already.
"""

import json
from dataclasses import asdict
from pathlib import Path

import command_line
import fit_process
import record
from study_parts.runs import read_metrics

from lit_rlkv.evaluation.intervals import wilson
from lit_rlkv.reporting.logged_samples import LoggedSample, read_samples
from lit_rlkv.reporting.tables import markdown_table

NAME = "smollm2"
KEPT = ("prompt", "completion", "answer", "reward")
"""Fields of a sample."""


def overrides(seed: int) -> list[str]:
    """Return the overrides for fit besides its folders."""
    return ["recipe=smollm2", f"seed={seed}"]


def is_finished(folder: Path) -> bool:
    """True if the run has evaluated its last model."""
    path = folder / "evaluation.json"
    return path.is_file() and bool(json.loads(path.read_text())["after"])


def run(seed: int, runs_dir: Path) -> dict:
    """Train with a seed unless its run has finished; the row is on disk when this returns."""
    folder = runs_dir / NAME / f"seed{seed}"
    if not is_finished(folder):
        fit_process.fit(folder, runs_dir, overrides(seed), n_threads=None)
    row = {"seed": seed, "overrides": overrides(seed), **found(folder)}
    record.append(NAME, row)
    return row


def found(folder: Path) -> dict:
    """Return the measurements of a finished run."""
    evaluated = json.loads((folder / "evaluation.json").read_text())
    history = read_metrics(folder)
    samples = read_samples(folder / "samples.jsonl")
    iterations = [sample.iteration for sample in samples]

    def accuracy(moment: str) -> dict[str, float]:
        by_cache = {result["cache"] == "dense": result["accuracy"] for result in evaluated[moment]}
        return {"dense": by_cache[True], "sparse": by_cache[False]}

    def of_iteration(number: int) -> list[dict]:
        return [kept(sample) for sample in samples if sample.iteration == number]

    return {
        "n_problems": evaluated["after"][0]["n_problems"],
        "before": accuracy("before"),
        "after": accuracy("after"),
        "replay_gap": max(float(row["kv/replay_gap"]) for row in history if row["kv/replay_gap"]),
        "rewards": [float(row["reward"]) for row in history],
        "smd_kl": [float(row["smd/kl"]) for row in history],
        "stage_seconds": evaluated["stage_seconds"],
        "samples": {"first": of_iteration(min(iterations)), "last": of_iteration(max(iterations))},
    }


def kept(sample: LoggedSample) -> dict:
    """The fields of a sample that a row holds."""
    return {name: value for name, value in asdict(sample).items() if name in KEPT}


def report(rows: list[dict]) -> str:
    """Return a Markdown table with Wilson's 95 % intervals."""
    headings = [
        "seed",
        "budget, before",
        "budget, after",
        "gain",
        "all keys, before",
        "all keys, after",
        "minutes",
    ]
    body = []
    for row in sorted(rows, key=lambda row: row["seed"]):

        def cell(moment: str, view: str, row: dict = row) -> str:
            share = wilson(row[moment][view], row["n_problems"])
            return f"{100 * share.value:.1f} ({100 * share.low:.0f}–{100 * share.high:.0f})"

        gain = 100 * (row["after"]["sparse"] - row["before"]["sparse"])
        body.append(
            [
                str(row["seed"]),
                cell("before", "sparse"),
                cell("after", "sparse"),
                f"{gain:+.1f}",
                cell("before", "dense"),
                cell("after", "dense"),
                f"{sum(row['stage_seconds'].values()) / 60:.0f}",
            ]
        )
    return markdown_table(headings, body)


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--report", action="store_true", help="print the table, run nothing")
    args = parser.parse_args()
    if not args.report:
        done = {row["seed"] for row in record.rows(NAME)}
        for seed in args.seeds:
            if seed not in done:
                run(seed, args.runs_dir.absolute())
    print(report(record.rows(NAME)))


if __name__ == "__main__":
    main()
