"""Does compressing the KV cache hurt RL, and what repairs it: every arm, its controls, tasks, budgets.

    python benchmarks/study.py --record [--blocks rates main ...] [--jobs 2] [--minutes 90] [--runs-dir runs]
    python benchmarks/study.py --report                     tables and figures of what has been run
    python benchmarks/study.py --report --rows study_earlier   tables of runs before 2026-11-25, evicted later

Runs what is missing in benchmarks/results/study.jsonl, block after block, and stops to start new runs when
the minutes are over; started again, it goes on. Each run is a process of fit with one thread.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import command_line
import record
from study_parts import measured, overlap, plan, plot, runs, tables
from study_parts.evictions import eviction_table, evictions
from study_parts.plan import Setting


def chosen_rate(done: dict[str, dict], arm: str, anchored: bool) -> float:
    """The learning rate that left an arm most accurate in the cache of its rollouts, by the tuning seed.

    Raises:
        LookupError: a run of the block `rates` is missing.
    """
    tried = [setting for setting in plan.rates() if (setting.arm, setting.anchored) == (arm, anchored)]
    rows = [done.get(runs.key(setting.overrides)) for setting in tried]
    if any(row is None for row in rows):
        raise LookupError(f"{arm}: the block `rates` has not been run")
    view = "dense" if arm == "dense" else "sparse"
    best = max((row for row in rows if row), key=lambda row: row[f"{view}_accuracy_after"])
    return best["lr"]


def settings_of(block: str, done: dict[str, dict]) -> list[Setting]:
    def rate(arm: str, anchored: bool) -> float:
        return chosen_rate(done, arm, anchored)

    if block == "rates":
        return plan.rates()
    if block == "clock":
        return plan.clock(measured.seconds_of)
    if block == "evictions":
        return [*evictions()]
    return plan.BLOCKS[block](rate)


def run_missing(wanted: Iterable[Setting], done: dict[str, dict], args: argparse.Namespace) -> bool:
    """Run what is not done yet, several at a time; False once the time is over."""
    missing = [setting for setting in wanted if runs.key(setting.overrides) not in done]
    stop_at = args.stop_at
    warm = {(setting.task, setting.seed): setting for setting in missing}

    def work(setting: Setting) -> None:
        if time.monotonic() < stop_at:
            row = runs.run(setting, args.runs_dir)
            done[runs.key(setting.overrides)] = row
            print(describe(row), flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        if time.monotonic() < stop_at:
            list(pool.map(lambda setting: runs.run_sft(setting, args.runs_dir), warm.values()))
        list(pool.map(work, missing))
    return all(runs.key(setting.overrides) in done for setting in missing)


MAIN_PLACE = f"{plan.MAIN_TASK}, budget {plan.BUDGETS[plan.MAIN_TASK]}"
COMPARISONS = {
    f"{MAIN_PLACE}, the rate chosen for each arm": ("main", "controls"),
    f"{MAIN_PLACE}, one rate": ("one_rate",),
    f"{MAIN_PLACE}, one rate, without the anchor": ("one_rate_free",),
    f"{MAIN_PLACE}, one rate, a weaker anchor": ("weak_anchor",),
    f"{MAIN_PLACE}, one rate, more iterations": ("longer",),
    f"{MAIN_PLACE}, one rate, as long as smd takes": ("clock",),
}
"""Blocks that are read together, by title; `comparisons` cuts up those of tasks, budgets, policies."""
FIGURES = {
    f"{MAIN_PLACE}, one rate": "study.png",
    f"products, budget {plan.BUDGETS['products']}, one rate": "study_tools.png",
}
"""Figures of docs/results/study.md, by the title of what they show."""
PICTURES = record.ROOT / "docs" / "results" / "pictures"


def comparisons(done: dict[str, dict]) -> dict[str, list[dict]]:
    """Return the compared rows by title."""
    found: dict[str, list[dict]] = {}
    for title, blocks in COMPARISONS.items():
        with suppress(LookupError):  # what it is derived from has not been run
            found[title] = rows_of(
                [setting for block in blocks for setting in settings_of(block, done)], done
            )
    blocks = ("tasks", "half_learned", "budgets", "policies", "pretrained", "tools", "more_tools")
    for block in (*blocks, "pretrained_policies"):
        for setting in settings_of(block, done):
            title = f"{setting.task}, budget {setting.budget}, one rate"
            if setting.policy != plan.MAIN_POLICY:
                title += f", {setting.policy}"
            if not setting.anchored:
                title += ", without the anchor"
            rows = found.setdefault(title, [])
            rows += [row for row in rows_of([setting], done) if row not in rows]  # two blocks may share runs
    return found


def rows_of(settings: Iterable[Setting], done: dict[str, dict]) -> list[dict]:
    return [row for setting in settings if (row := done.get(runs.key(setting.overrides)))]


def overlap_rows(done: dict[str, dict]) -> list[dict]:
    """Return the rows of the blocks of the overlap."""
    blocks = ("overlap", "overlap_more", "overlap_high")
    return rows_of([setting for block in blocks for setting in settings_of(block, done)], done)


def report(done: dict[str, dict]) -> str:
    """Return every table."""
    tuning = rows_of(settings_of("rates", done), done)
    variances, exposures = (
        list(runs.finished(name).values()) for name in (measured.VARIANCE, measured.EXPOSURE)
    )
    found = tables.report(comparisons(done), tuning, measured.rounds(), variances, exposures)
    if rows := overlap_rows(done):
        found += f"\n\n## Overlap\n\n{overlap.table(rows)}"
    if learned := rows_of(evictions(), done):
        found += f"\n\n## Learned evictions\n\n{eviction_table(learned)}"
    return found


def draw(done: dict[str, dict]) -> None:
    """Draw the figures."""
    for title, name in FIGURES.items():
        if arms := tables.by_arm(comparisons(done).get(title, ())):
            plot.draw(arms, PICTURES / name)
    if rows := overlap_rows(done):
        overlap.draw([row for row in rows if row["lr"] == plan.COMMON_RATE], PICTURES / "overlap.png")


def describe(row: dict) -> str:
    def percent(name: str) -> str:
        value = row[name]
        return "  –  " if value is None else f"{100 * value:5.1f}"

    return (
        f"{row['task']:10} {row['policy']:8} {row['budget']:3} {row['name']:18} lr {row['lr']:<7} "
        f"seed {row['seed']:3}  budget {percent('sparse_accuracy_before')} -> "
        f"{percent('sparse_accuracy_after')}  dense {percent('dense_accuracy_before')} -> "
        f"{percent('dense_accuracy_after')}  {row['rollout_seconds'] + row['update_seconds']:4.0f} s"
    )


def main() -> None:
    parser = command_line.Parser(__doc__, runs.NAME)
    parser.add_argument("--blocks", nargs="+", default=["rates", *plan.BLOCKS, "clock", "evictions"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--report", action="store_true", help="print tables, draw the figure, run nothing")
    parser.add_argument("--rows", default=runs.NAME, metavar="NAME", help="rows to report, in results/")
    args = parser.parse_args()
    if args.report:
        done = runs.finished(args.rows)
        print(report(done))
        if args.rows == runs.NAME:
            draw(done)
        return
    args.stop_at = time.monotonic() + 60 * args.minutes
    args.runs_dir = args.runs_dir.absolute()
    done = runs.finished()
    for block in args.blocks:
        if not run_missing(settings_of(block, done), done, args):
            sys.exit(f"the time is over in block {block}; start again to go on")


if __name__ == "__main__":
    main()
