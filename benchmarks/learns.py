"""Does it learn here: GRPO with all keys, and with h2o and snapkv under a budget, by python -m lit_rlkv.fit.

    python benchmarks/learns.py --record [--task smollm2] [--iterations 80] [--minutes 8]
    python benchmarks/learns.py --report [--task smollm2]       table and picture of what has been run

A run for each arm, one after another: the task and the model of the default run, from scratch, or
SmolLM2-135M under its recipe (`make smollm2` fetches the model). The table has the reward of the first and
the last iterations, tokens per second of the rollout, seconds of rollout and update, and peak memory; the
picture, FOLDER/learns_TASK.png, has the reward by iteration. Started again, the command resumes a run that
the end of the time cut off, and runs no arm that is in the record.

Needs all that the package depends on. --toy takes tiny sizes on a CPU.
"""

import argparse
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import command_line
import fit_process
import record

NAME = "learns"
COMMON = ("algorithm=grpo", "stages=[sft,rl]", "seed=0", "callbacks.checkpoint_every=5")
COMMON += ("diagnostics=light", "diagnostics.mismatch=null", "diagnostics.cache=null")  # performance alone
TASKS: dict[str, tuple[str, ...]] = {"from_scratch": (), "smollm2": ("recipe=smollm2",)}
ARMS = {
    "all keys": ("experiment=dense",),
    "h2o": ("experiment=shadow", "cache.policy=h2o"),
    "snapkv": ("experiment=shadow", "cache.policy=snapkv"),
}
TOY = ("sft.n_steps=4", "sft.batch_size=8", "sft.n_pairs=4", "rollout.n_prompts=4", "algorithm.group_size=2")
N_MEAN = 5
"""Iterations whose mean stands for the begin or the end of a run."""
HEADINGS = ("cache", "reward, first", "last", "tokens/s", "rollout s", "update s", "peak MiB")
Row = dict


def run(arm: str, args: argparse.Namespace, ends_at: float | None) -> Row:
    """Train an arm, from where it was if it was cut off, and return its row.

    Raises:
        subprocess.TimeoutExpired: the time is over.
    """
    overrides = [*COMMON, *TASKS[args.task], *ARMS[arm], f"algorithm.n_iterations={args.iterations}"]
    folder = args.folder / f"{args.task}{'_toy' if args.toy else ''}" / arm.replace(" ", "_")
    fit_process.fit(
        folder,
        args.folder,
        [*overrides, *(TOY if args.toy else ())],
        n_threads=None,
        resumes=True,
        limit_s=None if ends_at is None else ends_at - time.monotonic(),
    )
    return {"arm": arm, "overrides": overrides, **found(folder)}


def found(folder: Path) -> Row:
    """Return what a finished run has measured; costs without the first iteration, which compiles."""
    from study_parts.runs import read_metrics

    history = read_metrics(folder)

    def median(name: str) -> float:
        return statistics.median([float(row[name]) for row in history if row.get(name)][1:])

    peaks = [float(row[name]) for row in history for name in row if is_peak(name) and row[name]]
    return {
        "rewards": [round(float(row["reward"]), 4) for row in history],
        "tokens_per_s": median("perf/tokens_per_second/rollout"),
        "rollout_s": median("time/rollout"),
        "update_s": median("time/update"),
        "peak_mib": max(peaks, default=0.0) / 2**20,
    }


def is_peak(name: str) -> bool:
    """True for the columns of a phase's peak: of the GPU, or of the process where there is none."""
    return name.startswith("memory/") and name.endswith("peak")


def table(rows: Sequence[Row]) -> str:
    """Return the table, in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for row in rows:
        first, last = (statistics.mean(part) for part in (row["rewards"][:N_MEAN], row["rewards"][-N_MEAN:]))
        costs = f"{row['tokens_per_s']:,.0f} | {row['rollout_s']:.2f} | {row['update_s']:.2f}"
        lines.append(f"| {row['arm']} | {first:.3f} | {last:.3f} | {costs} | {row['peak_mib']:,.0f} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the reward by iteration, a line for each arm."""
    from lit_rlkv.reporting.plots import style

    figure, axes = style.single_axes("iteration", "reward")
    for place, row in enumerate(rows):
        iterations = range(1, len(row["rewards"]) + 1)
        axes.plot(iterations, row["rewards"], color=style.run_color(place), label=row["arm"])
    style.finish(figure, axes).savefig(path, dpi=150)
    print(f"written: {path}")


def is_of(row: Row, **wanted: object) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--task", choices=TASKS, default="from_scratch")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--folder", type=Path, default=Path("runs/learns"), help="of runs and the picture")
    parser.add_argument("--report", action="store_true", help="print table and picture, run nothing")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU; the figures mean nothing")
    command_line.add_restart_options(parser)
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    args.iterations = args.iterations or (2 if args.toy else 30 if args.task == "smollm2" else 80)
    key = {"task": args.task, "toy": args.toy, "n_iterations": args.iterations}
    ends_at = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    rows = []
    for arm in ARMS:
        row = None if args.again else record.find(NAME, arm=arm, **key)
        if args.report:  # of any version
            row = next((row for row in reversed(record.rows(NAME)) if is_of(row, arm=arm, **key)), None)
        elif row is None:
            try:
                row = key | run(arm, args, ends_at)
            except subprocess.TimeoutExpired:
                print(f"{arm}: no time left; start again to go on")
                break
            record.append(NAME, row)
            print(table([row]), flush=True)
        rows += [] if row is None else [row]
    if rows:
        print("\n" + table(rows))
        place = args.folder if record.one_file() is None else Path(record.one_file()).parent
        draw(rows, place / f"learns_{args.task}.png")


if __name__ == "__main__":
    main()
