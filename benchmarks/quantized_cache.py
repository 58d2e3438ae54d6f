"""Rounded keys and values on a pretrained model: what they cost at equal bytes, and how exact the replay is.

    python benchmarks/quantized_cache.py --record [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--parts replay]
    python benchmarks/quantized_cache.py --report         tables and figure of docs/results/pretrained.md

`make smollm2` fetches the model. *answers*: documents and few-shot questions, the prompts and the measures of
benchmarks/pretrained.py, for each `cache.dtype` with all keys and at the budgets that fit in the bytes of 16,
32, 64 and 128 keys in 16 bit. The model computes in float32; a cache that rounds nothing is counted as 16
bit. *replay*: a rollout of text, and the gap of its replay by the learner, by one without the record of the
codes, and by one that does not round. *drift*: the error of vectors that moved since their codes were
recorded, without a model. *schemes*: the KL of rounding with and without a zero point, over text
with all keys. `--record` keeps a row for each cell; started again, it measures what is
missing.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import record
import torch
from pretrained import MODEL, ROOT, model_folder
from pretrained_parts.answers import Answers, timed
from pretrained_parts.rollouts import Models
from quantized_parts import drift, replay, report, schemes
from quantized_parts.answers import DTYPES, SIZES, cells
from replay_gap import TEXTS
from time_limit import TimeLimit
from torch import Tensor

from lit_rlkv import CacheSpec
from lit_rlkv.kernels.quantization import KV_DTYPES

NAME = "quantized_cache"
FIGURE = ROOT / "docs" / "results" / "pictures" / "quantized_cache.png"
TEXT = {"rows": 4, "tokens": 256}
"""Size of the text that the schemes are measured on."""
ROWS, PROMPT, NEW = 2, 128, 48
"""Rollouts whose replay is measured: sequences, and tokens of prompts and responses."""
CACHES = {"dense": CacheSpec.dense(), "snapkv": CacheSpec("snapkv", 64, 16, 4, 8)}
PRECISIONS = ("float32", "bfloat16")


Cells = Iterator[tuple[dict, Callable[[], dict]]]
"""The identity of each measurement, and a function that makes it."""


def text_of(models: Models, n_rows: int, n_tokens: int) -> Tensor:
    """Return text of this site, [row, token]."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in TEXTS)
    return models.tokenizer(text, return_tensors="pt").input_ids[0, : n_rows * n_tokens].view(n_rows, -1)


def scheme_cells(models: Models, model: str) -> Cells:
    for bits, scheme in product(schemes.BITS, schemes.SCHEMES):
        cell = {"block": "schemes", "bits": bits, "scheme": scheme, **TEXT}
        yield cell, partial(schemes.measure, models.float32, text_of(models, *TEXT.values()), scheme, bits)


def replay_cells(models: Models, model: str) -> Cells:
    ids = text_of(models, ROWS, PROMPT)
    for precision, policy, dtype in product(PRECISIONS, CACHES, DTYPES):
        cell = {"block": "replay", "precision": precision, "policy": policy, "dtype": dtype}
        cell |= {"rows": ROWS, "prompt": PROMPT, "tokens": NEW}
        spec = replace(CACHES[policy], dtype=dtype)
        yield cell, partial(replay.measure, getattr(models, precision), ids, spec, NEW)


def drift_cells(models: Models, model: str) -> Cells:
    for dtype, steps in product(KV_DTYPES, drift.STEPS):
        yield {"block": "drift", "dtype": dtype, "steps": steps}, partial(drift.measure, dtype, steps)


def answer_cells(models: Models, model: str) -> Cells:
    answers = Answers(models.float32, models.tokenizer, SIZES.history_tokens)
    for cell in cells():
        yield cell.described(model), partial(timed, answers.measure, cell)


MAKERS = {"schemes": scheme_cells, "replay": replay_cells, "drift": drift_cells, "answers": answer_cells}


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL, help="GGUF file or checkpoint folder")
    parser.add_argument("--parts", nargs="+", choices=MAKERS, default=list(MAKERS))
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
        for cell, measure in MAKERS[part](models, args.model.stem):
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
