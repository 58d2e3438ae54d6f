"""Costs of eviction for a pretrained model: accuracy, perplexity, divergence, importance weights, replay.

    python benchmarks/pretrained.py --record [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--chunks 1]
    python benchmarks/pretrained.py --fast              a look at the output in a minute
    python benchmarks/pretrained.py --report            tables and figure of docs/results/pretrained.md

`make smollm2` or `python scripts/fetch_model.py` fetches the model. Every policy and budget answers questions
on documents, few-shot questions and long chats; then come sampled rollouts of up to 1,024 tokens. A chunk is
one batch of prompts. `--record` keeps a row for each finished cell; started again, it goes on, and with more
chunks it adds prompts.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import record
import torch
from pretrained_parts import plot, rollouts, tables
from pretrained_parts.answers import Answers, timed
from pretrained_parts.results import Results
from pretrained_parts.setting import FAST, FULL, KINDS, NAME, Cell, Sizes, cells

from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.runs.starting_model import CONVERTED_MODELS

ROOT = record.ROOT
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FIGURE = ROOT / "docs" / "results" / "pictures" / "pretrained.png"


def missing(wanted: Sequence[Cell], model: str, rows: Sequence[dict]) -> list[Cell]:
    """Return the cells that have no row."""
    done = [row["cell"] for row in rows]
    return [cell for cell in wanted if cell.described(model) not in done]


def model_folder(path: Path) -> Path:
    """Return a folder that transformers loads: the path itself, or the conversion of a GGUF file."""
    return converted_gguf(path, ROOT / "runs" / CONVERTED_MODELS) if path.suffix == ".gguf" else path


def run(folder: Path, model: str, sizes: Sizes, n_chunks: int, minutes: float) -> list[dict]:
    """Measure the cells that are not recorded until the minutes are over, and return all their rows."""
    todo = missing(list(cells(sizes, n_chunks)), model, record.rows(NAME))
    stop_at = time.monotonic() + 60 * minutes
    models = rollouts.Models(folder)
    answers: Answers | None = None
    for place, cell in enumerate(todo):
        if time.monotonic() > stop_at:
            print(f"the time is over with {len(todo) - place} cells to do; start again to go on")
            break
        if cell.block in KINDS:
            answers = answers or Answers(models.float32, models.tokenizer, sizes.history_tokens)
            found = timed(answers.measure, cell)
        else:
            answers = None  # frees its stored prefills
            found = timed(lambda cell: rollouts.measure(models, cell), cell)
        row = {"cell": cell.described(model), **found}
        record.append(NAME, row)
        print(f"{describe(row)}   {len(todo) - place - 1} cells to go", flush=True)
    return record.rows(NAME)


def describe(row: dict) -> str:
    """Return one line on a measured cell."""
    cell = row["cell"]
    parts = [f"{cell['block']:8} {cell['policy']:9} {cell['budget'] or 'all':>4}", f"{row['seconds']:5.1f} s"]
    if row.get("right"):
        parts.append(f"right {sum(row['right'])} of {len(row['right'])}")
    if "kl" in row:
        parts.append(f"KL {sum(row['kl']) / row['n_tokens']:.3f}")
    if "gap" in row:
        parts.append(f"gap {row['gap']['max']:.2g}")
    if "by_length" in row:
        parts.append(f"ESS {list(row['by_length'].values())[-1]['ess_tis']:.3f}")
    return "  ".join(parts)


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL, help="GGUF file or checkpoint folder")
    parser.add_argument("--chunks", type=int, default=1, help="batches of prompts of each kind")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--threads", type=int, help="of this process; default: those that torch takes")
    parser.add_argument("--fast", action="store_true", help="few small cells")
    parser.add_argument("--report", action="store_true", help="print tables, draw the figure, run nothing")
    args = parser.parse_args()
    if args.report:
        results = Results.of(record.rows(NAME))
        print(tables.report(results))
        plot.draw(results, tables.SHOWN_BUDGET, FIGURE)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes, n_chunks = (FAST, 1) if args.fast else (FULL, args.chunks)
    folder = model_folder(args.model)
    run(folder, args.model.stem, sizes, n_chunks, args.minutes)
    if args.fast:
        print(tables.report(Results.of([row for _, row in record.unrecorded])))


if __name__ == "__main__":
    main()
