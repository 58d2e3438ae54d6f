"""Rounded keys and values on a pretrained model: what they cost at equal bytes, and how exact the replay is.

    python benchmarks/rounded_cache.py [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--parts replay answers]
    python benchmarks/rounded_cache.py --report         tables and figure of docs/results/pretrained.md

`make smollm2` fetches the model. *answers*: documents and few-shot questions, the prompts and the measures of
benchmarks/pretrained.py, for each `cache.dtype` with all keys and at the budgets that fit in the bytes of 16,
32, 64 and 128 keys in 16 bit. The model computes in float32; a cache that rounds nothing is counted as 16
bit. *replay*: a rollout of text, the share of codes that differ between sampler and learner, and the gap of
the replay, also of a learner that takes the sampler's codes and of one that does not round. Each cell is a
row of benchmarks/results/rounded_cache.jsonl; started again, it measures what is missing.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import record
import torch
from pretrained import MODEL, ROOT, model_folder
from pretrained_parts.answers import Answers, timed
from pretrained_parts.rollouts import Models
from replay_gap import TEXTS
from rounded_parts import replay, report
from rounded_parts.answers import DTYPES, SIZES, cells
from time_limit import TimeLimit

from lit_rlkv import CacheSpec

NAME = "rounded_cache"
FIGURE = ROOT / "docs" / "results" / "pictures" / "rounded_cache.png"
PARTS = ("replay", "answers")
ROWS, PROMPT, NEW = 4, 256, 64
"""Rollouts whose replay is measured: sequences, and tokens of prompts and responses."""
CACHES = {"dense": CacheSpec.dense(), "snapkv": CacheSpec("snapkv", 64, 16, 4, 8)}
PRECISIONS = ("float32", "bfloat16")


def replay_cells(models: Models) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """Yield what identifies each measurement of the replay, and how to make it."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in TEXTS)
    ids = models.tokenizer(text, return_tensors="pt").input_ids[0, : ROWS * PROMPT].view(ROWS, PROMPT)
    for precision, policy, dtype in product(PRECISIONS, CACHES, DTYPES):
        cell = {"block": "replay", "precision": precision, "policy": policy, "dtype": dtype}
        cell |= {"rows": ROWS, "prompt": PROMPT, "tokens": NEW}
        spec = replace(CACHES[policy], dtype=dtype)

        def measure(precision: str = precision, spec: CacheSpec = spec) -> dict:
            return replay.measure(getattr(models, precision), ids, spec, NEW)

        yield cell, measure


def answer_cells(models: Models, model: str) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """Yield the same for right answers and KL."""
    answers = Answers(models.float32, models.tokenizer, SIZES.history_tokens)
    for cell in cells():
        yield cell.described(model), lambda cell=cell: timed(answers.measure, cell)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL, help="GGUF file or checkpoint folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--report", action="store_true", help="print tables, draw the figure, run nothing")
    command_line.add_restart_options(parser)
    args = parser.parse_args()
    if args.report:
        rows = record.rows(NAME)
        print(report.tables(rows))
        report.draw(rows, FIGURE)
        return
    torch.set_num_threads(1)
    models, limit = Models(model_folder(args.model)), TimeLimit(args.minutes)
    done = [] if args.again else [row["cell"] for row in record.rows(NAME)]
    for part in args.parts:
        found = replay_cells(models) if part == "replay" else answer_cells(models, args.model.stem)
        for cell, measure in found:
            cell = {"model": args.model.stem} | cell
            if cell in done:
                continue
            if limit.is_over:
                print("no time left; start again to go on")
                return
            row = {"cell": cell, **measure()}
            record.append(NAME, row)
            print(report.line(row), flush=True)


if __name__ == "__main__":
    main()
