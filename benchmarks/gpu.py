"""Prove the project on a GPU, stage by stage, in a machine that is lent for minutes and has no network.

    python benchmarks/gpu.py --out FOLDER [--stages T G R] [--minutes 9]
    python benchmarks/gpu.py --out FOLDER --toy        the whole path at toy size on a CPU
    python benchmarks/gpu.py --page FILE.jsonl         the page of rows that another machine measured

Stages run in the order in which they are worth their time (gpu_parts/stages.py), and the command ends after
`--minutes`. The same command again, with the same FOLDER or with a copy of its gpu.jsonl, goes on: stages
that are done are left out, and one that was cut off measures what it lacks, last if it had all its time. A
stage that crashes does not stop the next, nor does one whose packages are missing. Printed after each stage
and written to FOLDER/gpu.md is what was measured against its target (gpu_parts/targets.py); FOLDER/gpu.log
has the output. The exit status is 1 if a stage crashed, a target was not met, or tests did not all run.

Needs torch, triton, transformers, jaxtyping and pytest, and no installation of this package; stages of whole
runs need its dependencies too.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import command_line
import record
from gpu_parts import page
from gpu_parts.stages import LOG, MINUTES, MOST_MINUTES, PAGE, TITLES, Ended, environment, run_stage, say
from gpu_parts.targets import figures
from time_limit import TimeLimit

LEAST_MINUTES = 0.5
"""A stage does not begin with less."""


def main() -> None:
    args = parse()
    if args.page is not None:
        print(page_of(args.page))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment(args.out, is_toy=args.toy))
    is_good, log = True, args.out / LOG
    if not args.toy:
        say(smoke_test(), log)
    limit = TimeLimit(args.minutes)
    for stage in args.stages or stages_left():
        most = MINUTES.get(stage, MOST_MINUTES)
        minutes = min(most, limit.minutes_left)
        if minutes < LEAST_MINUTES and not args.toy:
            say(f"{stage}: no time left; the same command goes on", log)
            continue
        say(f"\n== {stage}: {TITLES[stage]}, at most {minutes:.1f} minutes", log)
        ended = run_stage(stage, args.out, minutes, is_toy=args.toy)
        text, meets_targets = write_page(args.out, stage, ended, had_all=minutes == most, is_toy=args.toy)
        say("\n" + text, log)
        # Of the tests none may be left out; a benchmark that runs out of time goes on when it is run again.
        has_ended = ended.outcome in ("done", "left out") or (
            ended.outcome == "out of time" and stage not in ("T", "A")
        )
        is_good = is_good and has_ended and (meets_targets or args.toy)
    sys.exit(0 if is_good else 1)


def stages_left() -> list[str]:
    """Return the stages that are not done on this machine and version, last those that had their time."""
    ended = {row["stage"]: row for row in page.read_records()["stages"]}
    done = {stage for stage, row in ended.items() if row["outcome"] in ("done", "left out")}
    left = [stage for stage in TITLES if stage not in done]
    return sorted(left, key=lambda stage: stage in ended and ended[stage]["had_all"])


def page_of(file: Path) -> str:
    """Return the page of the device and version that the last row of a file is from."""
    os.environ["BENCHMARK_RESULTS"] = str(file)
    *_, last = (row for name in page.NAMES for row in record.rows(name))
    return page.written(page.read_records(last), last, is_toy=False)


def smoke_test() -> str:
    """Say which GPU this is; memory that cannot grow in place here is allocated in the usual way.

    The test runs in another process, because CUDA reads the setting once.
    """
    code = "import torch; torch.ones(2**20, device='cuda').sum().item(); print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    return f"expandable_segments does not work here: {done.stderr.strip().splitlines()[-1]}"


def write_page(folder: Path, stage: str, ended: Ended, *, had_all: bool, is_toy: bool) -> tuple[str, bool]:
    """Record how a stage ended, and write gpu.md from all rows of the folder.

    Args:
        had_all: the stage had as many minutes as it may take.

    Returns:
        The part of this stage, and True if all its targets are met.
    """
    record.append("stages", {"stage": stage, "had_all": had_all, **asdict(ended)})
    records = page.read_records()
    (folder / PAGE).write_text(page.written(records, record.provenance(), is_toy=is_toy), encoding="utf-8")
    meets_targets = all(figure.is_good for figure in figures([stage], records))
    return page.section(stage, records, is_toy=is_toy), meets_targets


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder of gpu.jsonl, gpu.md and gpu.log")
    target.add_argument("--page", type=Path, help="file of rows whose page to print; nothing is measured")
    parser.add_argument("--stages", nargs="+", choices=TITLES, help="default: all that are not done")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the command")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU; the figures mean nothing")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {args.minutes:g}")
    if not args.toy and args.page is None:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU; --toy runs the whole path at toy size on a CPU")
    return args


if __name__ == "__main__":
    main()
