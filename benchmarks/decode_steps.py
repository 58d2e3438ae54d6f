"""Count, without a model, the decode steps that compact rows and the slots that decode attention reads.

    python benchmarks/decode_steps.py [--prompts 128] [--budget 1024] [--interval 128]

Responses of random lengths go through the loop of generate(), with a check for ended rows every 16 steps as
on CUDA: all at a time, and a quarter at a time, so that rows are refilled. *full* compacts a row once all its
slots are taken, *clock* every `interval` steps of the row, as the cache does. *kept* are the slots read if an
ended row held its keys, *read* those read if it holds one.

The same responses with a dense cache: *used* are the most keys of running rows at a time, *grown* the most
slots that the cache has, which grows with the rows that run, *reserved* those for the longest response in
every row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import command_line
import torch
from text_table import text_table
from torch import Tensor

from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.cache import FillLevels
from lit_rlkv.rollout.decoder import FIRST_TOKENS, DecodedRows, Decoder
from lit_rlkv.rollout.generate import STOP_CHECK_EVERY, decode_all


class WhenFull(FillLevels):
    """Compacts a row when all its slots are taken, whatever the step."""

    def step(self) -> bool:
        self.level += 1
        is_full = self.level == self.budget + self.interval
        self.level[is_full] = self.budget
        return bool(is_full.any())


@dataclass
class Counts:
    """Totals of a rollout."""

    steps: int = 0
    evicting: int = 0
    """Steps after which rows are compacted."""
    read: int = 0
    """Slots of all rows that attention reads, one of an ended row."""
    kept: int = 0
    """The same if an ended row held its keys."""
    used: int = 0
    """Most keys of running rows at a time."""
    grown: int = 0
    """Most slots of the cache at a time."""


class CountingDecoder(Decoder):
    """Counts keys instead of decoding; a prompt is its length and that of its response."""

    def __init__(
        self, spec: CacheSpec, n_rows: int, longest_prompt: int, longest: int, *, when_full: bool
    ) -> None:
        self.n_rows = n_rows
        self.settings: Any = SimpleNamespace(max_new_tokens=longest)
        self.seq_len = longest_prompt + longest
        first = min(self.seq_len, longest_prompt + FIRST_TOKENS)
        self.kv = SlotCache(spec, 0, n_rows, self.seq_len, torch.device("cpu"), n_slots=first)
        if when_full:
            self.kv.levels = WhenFull(spec, n_rows, self.kv.n_slots)
            self.kv.spec = CacheSpec.dense()  # only a cache with a clock moves the checks
        self.left = torch.zeros(n_rows, dtype=torch.long)
        self.held = torch.ones(n_rows, dtype=torch.long)
        self.counts = Counts()
        self._masks = None
        self.keeps_rows = False

    @property
    def is_running(self) -> Tensor:  # type: ignore[override]
        return self.left > 0

    def prefill(self, rows: Sequence[int], input_ids: Tensor, is_prompt: Tensor) -> None:
        self.kv.levels.start(rows, input_ids[:, 0].tolist())
        self.left[list(rows)] = input_ids[:, 1] - 1  # the first token comes from prefill

    def grow(self, rows: Sequence[int]) -> None:
        self.kv.resize(torch.tensor(rows), self.next_size)
        self.left, self.held, self.n_rows = self.left[list(rows)], self.held[list(rows)], len(rows)

    def step(self) -> None:
        if not self.kv.has_room(1):
            self.grow(range(self.n_rows))
        self.counts.grown = max(self.counts.grown, self.n_rows * self.kv.n_slots)
        # Slots of rows that the loop knows to be free stay as they are.
        level = self.kv.levels.level + 1
        self.held = torch.where(self.is_running, level, self.held)
        self.counts.kept += int(self.held.sum())
        self.counts.used = max(self.counts.used, int(self.held[self.is_running].sum()))
        self.counts.read += int(self.held.where(self.is_running, 1).sum())
        self.counts.evicting += self.kv.levels.step()
        self.counts.steps += 1
        self.left -= 1

    def read_rows(self, rows: Sequence[int]) -> DecodedRows:
        ids = torch.zeros(len(rows), 1, dtype=torch.long)
        return DecodedRows(ids, ids.bool(), ids.float(), ids[:, None, None])


def count(
    prompt_lens: Tensor,
    response_lens: Tensor,
    spec: CacheSpec,
    n_rows: int,
    *,
    when_full: bool = False,
    check_every: int = STOP_CHECK_EVERY,
) -> Counts:
    """Decode one response to each prompt, `n_rows` at a time."""
    longest = int(prompt_lens.max()), int(response_lens.max())
    decoder = CountingDecoder(spec, n_rows, *longest, when_full=when_full)
    prompts = torch.stack([prompt_lens, response_lens], dim=1)
    decode_all(decoder, prompts, torch.ones_like(prompts, dtype=torch.bool), 1, check_every)
    return decoder.counts


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--interval", type=int, default=128)
    args = parser.parse_args()
    spec = CacheSpec("streaming", budget=args.budget, interval=args.interval, sink=1, window=3)
    draw = torch.Generator().manual_seed(0)
    prompt_lens = torch.randint(args.budget // 8, args.budget // 2, (args.prompts,), generator=draw)
    response_lens = torch.randint(args.budget // 2, 4 * args.budget, (args.prompts,), generator=draw)
    rows, dense_rows = [], []
    for n_rows in (args.prompts, args.prompts // 4):
        dense = count(prompt_lens, response_lens, CacheSpec.dense(), n_rows)
        reserved = n_rows * int(prompt_lens.max() + response_lens.max())
        slots = (dense.used, dense.grown, reserved)
        dense_rows.append([str(n_rows), *(f"{n:,}" for n in slots), f"{dense.grown / reserved:.2f}"])
        full, clock = (
            count(prompt_lens, response_lens, spec, n_rows, when_full=is_full) for is_full in (True, False)
        )
        rows.append(
            [
                str(n_rows),
                *(f"{found.steps:,}" for found in (full, clock)),
                *(f"{found.evicting / found.steps:.1%}" for found in (full, clock)),
                *(f"{slots / 1e6:.1f}" for slots in (clock.kept, clock.read)),
            ]
        )
    print(f"{args.prompts} prompts, {spec.budget}+{spec.interval} slots; millions of slots")
    headings = ["rows", "steps full", "steps clock", "evict full", "evict clock", "slots kept", "slots read"]
    print(text_table(headings, rows, n_left=0))
    print("\nDense cache; slots")
    headings = ["rows", "used", "grown", "reserved", "grown / reserved"]
    print(text_table(headings, dense_rows, n_left=0))


if __name__ == "__main__":
    main()
