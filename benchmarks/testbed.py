"""The default testbed: every arm at equal rollouts over seeds, accuracy dense and under the budget.

    python benchmarks/testbed.py [--arms smd shadow naive tis] [--seeds 0 1 2] [--jobs 2] [override ...]

An arm is any experiment preset, hydra_ppo and rlhf among them.
Runs `python -m lit_rlkv.fit experiment=ARM seed=SEED` for each pair, one thread each; runs that are already
in benchmarks/results/testbed.jsonl with the same overrides are not repeated. Ends with the table of means ±
standard deviations over seeds, before and after training. "recovered" is the part of the accuracy lost under
the budget that training won back.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command_line
import fit_process
import record
from omegaconf import OmegaConf
from study_parts.analysis import mean_sd
from text_table import text_table

NAME = "testbed"
SETTINGS = ("algorithm.n_iterations=150", "sft.batch_size=128", "sft.n_pairs=32")
"""Settings of every recorded run; they were the defaults then."""


def fit(name: str, arguments: list[str], runs_dir: Path) -> Path:
    """One run of fit in a process and a folder of its own."""
    folder = runs_dir / re.sub(r"[^\w.-]+", "_", name).strip("_")
    return fit_process.fit(folder, runs_dir, [*SETTINGS, *arguments])


def run_sft(arms: list[str], seed: int, runs_dir: Path) -> None:
    """Leave the SFT models that the arms of this seed start from; quick where there is one."""
    for arm in arms:
        fit(f"testbed-warm-{arm}-{seed}", [f"experiment={arm}", f"seed={seed}", "stages=[sft]"], runs_dir)


def run(arm: str, seed: int, overrides: list[str], runs_dir: Path) -> dict:
    """One arm, and what it found."""
    name = "-".join(["testbed", arm, str(seed), *overrides])
    folder = fit(name, [f"experiment={arm}", f"seed={seed}", *overrides], runs_dir)
    found = json.loads((folder / "evaluation.json").read_text())
    budget = OmegaConf.load(folder / "config.yaml").cache.budget
    sparse = next(i for i, row in enumerate(found["after"]) if row["budget"] == budget)
    before, after = found["before"], found["after"]
    row = {
        "arm": arm,
        "seed": seed,
        "overrides": overrides,
        "cache": after[sparse]["cache"],
        "dense_before": before[0]["accuracy"],
        "dense_after": after[0]["accuracy"],
        "sparse_before": before[sparse]["accuracy"],
        "sparse_after": after[sparse]["accuracy"],
        "kl_before": before[sparse]["kl"],
        "kl_after": after[sparse]["kl"],
        "replay_gap": max(row["replay_gap"] for row in before + after),
        "learned_before": before[sparse]["learned_reward"],
        "learned_after": after[sparse]["learned_reward"],
        "reward_model": found["reward_model"],
        "n_problems": after[0]["n_problems"],
        "rl_seconds": found["stage_seconds"]["rl"],
    }
    record.append(NAME, row)
    return row


def table(rows: list[dict]) -> str:
    views = [f"{view}_{moment}" for view in ("sparse", "dense") for moment in ("before", "after")]
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        columns = [mean_sd([row[name] for row in mine]) for name in views]
        recovered = [
            (row["sparse_after"] - row["sparse_before"]) / (row["dense_before"] - row["sparse_before"])
            for row in mine
        ]
        cells.append([arm, str(len(mine)), *columns, mean_sd(recovered)])
    headings = ("budget before", "budget after", "dense before", "dense after", "recovered, %")
    return text_table(["arm", "n", *headings], cells)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--arms", nargs="+", default=["smd", "shadow", "naive", "tis"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    args, overrides = parser.parse_known_args()
    done = {(row["arm"], row["seed"]): row for row in record.rows(NAME) if row["overrides"] == overrides}
    missing = [(arm, seed) for seed in args.seeds for arm in args.arms if (arm, seed) not in done]
    with ThreadPoolExecutor(args.jobs) as pool:
        seeds = sorted({seed for _, seed in missing})
        list(pool.map(lambda seed: run_sft(args.arms, seed, args.runs_dir), seeds))
        for row in pool.map(lambda pair: run(*pair, overrides, args.runs_dir), missing):
            done[row["arm"], row["seed"]] = row
    wanted = [done[arm, seed] for arm in args.arms for seed in args.seeds]
    print(table(wanted))


if __name__ == "__main__":
    main()
