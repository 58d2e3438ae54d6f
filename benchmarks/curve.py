"""A short training whose figures change with anything that moves curves, and what is then to be run again.

    python benchmarks/curve.py              the figures now, and whether they are those on record
    python benchmarks/curve.py --record     keep them: they stand for the code that the kept results came from

Outputs of notebooks carry the digest of the figures on record (`notebooks/execute.py`).
"""

import hashlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

import command_line
import fit_process
import record
from study_parts.runs import read_metrics

NAME = "curve"
OVERRIDES = (
    "experiment=smd",
    "seed=0",
    "sft.n_steps=150",
    "sft.n_pairs=0",
    "algorithm.n_iterations=4",
    "rollout.n_prompts=8",
    "stages=[sft,rl]",
    "diagnostics=none",
)
FIGURES = ("reward", "policy_loss", "entropy", "completions/mean_length", "kv/bytes", "smd/kl", "grad_norm")
"""SFT, sampling, eviction, replay, distillation and optimizer each move one of them."""
TOLERANCE = 1e-3
"""Relative. Processors differ by rounding; a token that is sampled otherwise moves figures by more."""
RUN_AGAIN = (
    "python benchmarks/curve.py --record",
    "python benchmarks/study.py --record --blocks one_rate    README, docs/results/study.md",
    "python benchmarks/smollm2.py --record                    README, docs/results/pretrained.md",
    "make notebooks",
)


def measure(folder: Path) -> dict[str, float]:
    """Train in this folder, and return the mean of each figure over the run."""
    rows = read_metrics(fit_process.fit(folder / "curve", folder, OVERRIDES))
    return {name: statistics.mean(float(row[name]) for row in rows if row.get(name)) for name in FIGURES}


def on_record() -> dict:
    """The latest row."""
    return record.rows(NAME)[-1]


def digest(row: dict) -> str:
    """What a row is known by."""
    return hashlib.sha256(json.dumps(row["figures"], sort_keys=True).encode()).hexdigest()[:12]


def moved(now: dict[str, float], then: dict[str, float]) -> str | None:
    """Say which figures differ and what is to be run again; None if all are equal up to rounding."""
    different = [
        f"{name}: {then.get(name)} on record, {value} now"
        for name, value in now.items()
        if name not in then or abs(value - then[name]) > TOLERANCE * abs(then[name])
    ]
    if not different:
        return None
    return "\n".join(
        ["something moves curves:", *different, "run again, and read what they say:", *RUN_AGAIN]
    )


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        now = measure(Path(folder))
    print(json.dumps(now, indent=2))
    if args.record:
        record.append(NAME, {"figures": now})
    elif found := moved(now, on_record()["figures"]):
        sys.exit(found)


if __name__ == "__main__":
    main()
