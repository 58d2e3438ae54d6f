"""Tokens per second of rollouts by policy and dtype, in turn with those of all keys."""

import time
from collections.abc import Iterator
from statistics import median

import torch
from ranking_parts.setting import DENSE, DTYPES, Cell, Sizes, cache_of
from ranking_parts.tables import NAMES
from ranking_parts.texts import Writer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv import generate
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.rng import stream

NAME = "ranking_speed"
BY_DTYPE = ("streaming", "snapkv", "expected")
"""Policies that are timed in every dtype; the others in 16 bit."""


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, rounds: int
) -> Iterator[dict]:
    """Yield a row per cell and round: its seconds, and those of all keys in 16 bit just before."""
    prompts = Writer(model, tokenizer).prompts(0, sizes.rows)
    place = {"slots": sizes.slots[0], "rows": sizes.rows, "tokens": sizes.tokens}
    cells = [Cell(DENSE, dtype, **place | {"slots": None}) for dtype in DTYPES[1:]]
    cells += [
        Cell(policy, dtype, **place)
        for dtype in DTYPES
        for policy in (sizes.policies if dtype is None else BY_DTYPE)
    ]

    def seconds(cell: Cell) -> float:
        cache = cache_of(cell, model, prompts.input_ids.shape[1])
        started_at = time.perf_counter()
        generate(
            model,
            prompts.input_ids,
            prompts.attention_mask,
            cache=cache,
            max_new_tokens=cell.tokens,
            eos_token_id=None,
            pad_token_id=tokenizer.eos_token_id,
            generator=stream(0, "ranking speed"),
        )
        return time.perf_counter() - started_at

    every_key = Cell(DENSE, None, **place | {"slots": None})
    seconds(every_key)
    for number in range(rounds):
        for cell in cells:
            dense = seconds(every_key)
            yield {
                "cell": cell.described(""),
                "round": number,
                "threads": torch.get_num_threads(),
                "all_keys_seconds": dense,
                "seconds": seconds(cell),
            }


def table(rows: list[dict]) -> str:
    """Return tokens per second, and the time of all keys over that of each cache: median of the rounds."""
    found: dict[tuple[str, str | None], list[dict]] = {}
    for row in rows:
        found.setdefault((row["cell"]["policy"], row["cell"]["dtype"]), []).append(row)
    body = []
    for (policy, dtype), group in found.items():
        n_tokens = group[0]["cell"]["rows"] * group[0]["cell"]["tokens"]
        ratios = sorted(row["all_keys_seconds"] / row["seconds"] for row in group)
        speed = n_tokens / median(row["seconds"] for row in group)
        name = "all keys" if policy == DENSE else f"`{policy}`"
        line = f"{median(ratios):.2f}" + (f" ({ratios[0]:.2f}–{ratios[-1]:.2f})" if len(group) > 1 else "")
        body.append((median(ratios), [name, NAMES[dtype], f"{speed:.0f}", line]))
    body.sort(key=lambda each: -each[0])
    headings = ["policy", "dtype", "tokens/s", "time of all keys in 16 bit / its own"]
    return markdown_table(headings, [line for _, line in body])
