"""The rollout against transformers.generate.

    python benchmarks/rollout.py [--device cuda] [--preset 1.5b|tiny] [--batch N] [--new N] [--budgets N ...]
                                 [--minutes M] [--compile-layers] [--skip-theirs] [--record]

Every run samples from random weights with no end of sequence, so all rows write `--new` tokens. Before
anything is timed, the plain definitions must replay the log-probs of a rollout that the kernels sampled.
Ours: tokens per second and allocated cache bytes at each budget; the first call apart, because it compiles.
Theirs: transformers.generate with its own dense cache, at the largest batch that fits, found by halving. The
time of a step is nearly linear in the length, so steps are timed at four lengths and integrated over all.

The first budget comes first, then theirs, then the other budgets. `--record` keeps a row for each at once;
started again with it, it measures what this machine and version of the package have no row for. `--minutes`
stops in time: a rollout that is cut off is extrapolated from its last half, and measured again by a restart.
Both kinds of estimate say so in their row (`"integrated": true`).
"""

import allocator  # noqa: F401  # isort: skip  (before torch)

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import command_line
import record
import torch
from rollout_parts.ours import time_ours
from rollout_parts.setting import PRESETS, Setting
from rollout_parts.theirs import time_theirs
from time_limit import TimeLimit

NAME = "rollout"
Row = dict[str, Any]


def measurements(
    setting: Setting, budgets: list[int], limit: TimeLimit, *, skip_theirs: bool
) -> Iterator[tuple[Row, Callable[[], Iterator[Row]]]]:
    """Yield the entries that tell a row from the others, and what measures it: estimates first."""
    first, *others = budgets
    ours = {
        "batch": setting.batch,
        "new": setting.new,
        "compile_layers": setting.compile_layers,
        "integrated": False,
    }
    yield ours | {"budget": first}, lambda: time_ours(setting, first, limit)
    if not skip_theirs:
        theirs = {"cache": "transformers dense", "asked_batch": setting.batch, "new": setting.new}
        yield theirs, lambda: iter([time_theirs(setting)])
    for budget in others:
        yield ours | {"budget": budget}, lambda budget=budget: time_ours(setting, budget, limit)


def parse() -> tuple[argparse.Namespace, Setting]:
    parser = command_line.Parser(__doc__, NAME)
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--preset", choices=PRESETS, default="1.5b" if has_cuda else "tiny")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--budgets", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-theirs", action="store_true", help="leave out transformers.generate")
    parser.add_argument("--compile-layers", action="store_true", help="rollout.compile_layers=true, for ours")
    command_line.add_restart_options(parser)
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    arguments.budgets = arguments.budgets or list(preset.budgets)
    return arguments, Setting(
        preset=arguments.preset,
        policy=arguments.policy,
        batch=arguments.batch or preset.batch,
        new=arguments.new or preset.new,
        rounds=arguments.rounds,
        device=torch.device(arguments.device),
        compile_layers=arguments.compile_layers,
    )


def main() -> None:
    arguments, setting = parse()
    common = {"preset": setting.preset, "policy": setting.policy, "rounds": setting.rounds}
    limit, rows = TimeLimit(arguments.minutes), []
    todo = measurements(setting, arguments.budgets, limit, skip_theirs=arguments.skip_theirs)
    for key, measure in todo:
        row = record.find(NAME, **common, **key) if arguments.record and not arguments.again else None
        if row is None and limit.is_over:
            print(f"{key.get('cache', key.get('budget'))}: no time left; start again to go on")
            continue
        if row is not None:
            print_row(row)
        for found in measure() if row is None else ():
            row = common | found
            record.append(NAME, row)
            print_row(row)
        rows.append(row)
    print_ratios(rows)


def print_row(row: Row) -> None:
    name = row["cache"] + (", compiled layers" if row.get("compile_layers") else "")
    line = f"{name:20} batch {row['batch']:4}: {row['tokens_per_s']:10,.0f} tokens/s "
    if "step_ms" in row:
        line += f"(integrated from steps of {row['step_ms'][-1]:.1f} to {row['step_ms'][0]:.1f} ms)"
    else:
        low, high = row["spread_s"]
        line += (
            f"(median {row['median_s']:.2f} s, {low:.2f} to {high:.2f}), first call {row['first_s']:.2f} s"
        )
        if row["integrated"]:
            line += f", extrapolated from {row['measured_new']:,} tokens a row"
        else:
            line += f", cache {row['kv_mib']:,.1f} MiB = {row['kv_of_dense']:.3f} of dense"
    print(line, flush=True)


def print_ratios(rows: list[Row]) -> None:
    """Print tokens per second over those of transformers."""
    theirs = [row["tokens_per_s"] for row in rows if "step_ms" in row]
    if theirs:
        print(", ".join(f"{row['cache']}: {row['tokens_per_s'] / theirs[0]:.2f} x" for row in rows))


if __name__ == "__main__":
    main()
