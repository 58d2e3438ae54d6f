"""Eviction policies and key dtypes at equal bytes while decoding: KL and overlap along responses, and recall.

    python benchmarks/ranking.py --record [--chunks 0 1] [--slots 48 96] [--minutes 60]
    python benchmarks/ranking.py --fast                     a look at the output in a minute
    python benchmarks/ranking.py [MODEL] --report           tables and figure of docs/results/ranking.md
    python benchmarks/ranking.py --speed 3 --record         tokens per second, in three rounds

`python scripts/fetch_model.py` fetches the model. A chunk is one batch of prompts. `--record` keeps a row for
each finished cell; started again, it goes on, and with more chunks it adds prompts.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pretrained
import record
import torch
from pretrained_parts.rollouts import Models
from ranking_parts import plot, speed, tables
from ranking_parts.measure import Measurer
from ranking_parts.results import Results
from ranking_parts.setting import FAST, FULL, NAME, Sizes, cells

FIGURE = record.ROOT / "docs" / "results" / "pictures" / "ranking.png"


def run(folder: Path, model: str, sizes: Sizes, chunks: Sequence[int], minutes: float) -> list[dict]:
    """Measure the cells that are not recorded until the minutes are over, and return all their rows."""
    todo = pretrained.missing(list(cells(sizes, chunks)), model, record.rows(NAME))
    stop_at = time.monotonic() + 60 * minutes
    models = Models(folder)
    measurer = Measurer(models.float32, models.tokenizer)
    for place, cell in enumerate(todo):
        if time.monotonic() > stop_at:
            print(f"the time is over with {len(todo) - place} cells to do; start again to go on")
            break
        row = {"cell": cell.described(model), **measurer.measure(cell)}
        record.append(NAME, row)
        print(f"{describe(row)}   {len(todo) - place - 1} cells to go", flush=True)
    return record.rows(NAME)


def describe(row: dict) -> str:
    """Return one line on a measured cell."""
    cell, kl = row["cell"], row["kl"]["text"]
    recalls = {
        name: [one for prompt in found["right"] for one in prompt] for name, found in row["recall"].items()
    }
    right = ", ".join(f"{name} {sum(each)}/{len(each)}" for name, each in recalls.items())
    return (
        f"{cell['chunk']} {cell['policy']:9} {cell['dtype'] or '16 bit':6} {cell['slots'] or 'all':>4} of "
        f"{cell['counted']}  KL {sum(kl) / len(kl):.3f}  {right}  {row['cpu_seconds']:.0f} s"
    )


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("model", nargs="?", type=Path, default=pretrained.MODEL, help="GGUF file or folder")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0], help="numbers of batches of prompts")
    parser.add_argument("--slots", type=int, nargs="+", default=FULL.slots, help="sizes of a head in 16 bit")
    parser.add_argument(
        "--policies", nargs="+", default=FULL.policies, help="names; 'h2o value_norms' turns an option on"
    )
    parser.add_argument(
        "--with-record", nargs="*", default=[], help="policies at equal bytes with the record"
    )
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--threads", type=int, help="of this process; default: those that torch takes")
    parser.add_argument("--fast", action="store_true", help="few small cells")
    parser.add_argument("--report", action="store_true", help="print tables, draw the figure, run nothing")
    parser.add_argument("--speed", type=int, metavar="ROUNDS", help="time rollouts, by policy and dtype")
    args = parser.parse_args()
    if args.report:
        results = Results.of(record.rows(NAME), args.model.stem)
        print(tables.report(results))
        is_first = args.model == pretrained.MODEL
        plot.draw(results, FIGURE if is_first else FIGURE.with_stem(f"ranking_{args.model.stem}"))
        if is_first:
            print(tables.options(Results.of(record.rows(NAME), args.model.stem, options=True), results))
            print(speed.table(record.rows(speed.NAME)))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = {
        "slots": tuple(args.slots),
        "policies": tuple(args.policies),
        "with_record": tuple(args.with_record),
    }
    sizes = FAST if args.fast else replace(FULL, **chosen)
    if args.speed:
        models, found = Models(pretrained.model_folder(args.model)), []
        sizes = replace(sizes, tokens=FAST.tokens)
        for row in speed.measure(models.float32, models.tokenizer, sizes, args.speed):
            record.append(speed.NAME, row)
            found.append(row)
        print(speed.table(found))
        return
    rows = run(pretrained.model_folder(args.model), args.model.stem, sizes, args.chunks, args.minutes)
    if args.fast:
        print(tables.report(Results.of(rows)))


if __name__ == "__main__":
    main()
