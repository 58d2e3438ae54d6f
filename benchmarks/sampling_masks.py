"""The cost of recording the tokens that top_k, top_p and min_p keep, and of a replay over them.

    python benchmarks/sampling_masks.py [--rows 16] [--tokens 40] [--vocab 49152] [--rounds 5]

A small model with a large vocabulary decodes with and without a record of the same samples, in turns. Then
log-probs and their gradient are computed over the whole vocabulary and over sets of given sizes. Times are
of the CPU, which other processes change little, and medians over rounds. Rows go to
benchmarks/results/sampling_masks.jsonl.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import command_line
import record
import torch
from sampled import sample
from text_table import text_table
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv import CacheSpec, prepare_backbone
from lit_rlkv.kernels.token_logps import TokenSets, token_logps
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.rollout import decoder
from lit_rlkv.rollout.mask_record import MaskRecord

CACHE = CacheSpec("streaming", budget=64, interval=16, sink=2, window=8)
SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZE |= {"head_dim": 64, "intermediate_size": 768}
TRUNCATIONS: dict[str, dict[str, float]] = {
    "whole vocabulary": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "min_p=0.05": {"min_p": 0.05},
    "top_k=50 top_p=0.9": {"top_k": 50, "top_p": 0.9},
}
SETS = {"whole vocabulary": None, "50 tokens": (50, 50), "1 to 2,000 tokens": (1, 2000)}
DIGITS = {"unrecorded_ms": 2, "recorded_ms": 2, "ratio": 3, "kept_per_token": 0, "bytes_per_token": 0}
LOGIT_STD = 5.0
"""Standard deviation of the random head's logits; top_p=0.9 then keeps a small part of the vocabulary."""


class Unrecorded(MaskRecord):
    """Records nothing, so that the same steps are timed without the record."""

    n_tokens = 0

    def write(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        self._n_used = 0

    def read(self, rows: Any) -> Any:
        counts = torch.zeros(self.n_tokens, dtype=torch.int32)
        return [(counts, counts[:0])] * len(rows)


def make_model(vocab: int) -> Any:
    torch.manual_seed(0)
    model = tiny_qwen3(vocab, 0, 1, **SIZE)
    # A head of its own: a tied one would repeat the newest token for ever. The last norm has a size of √dim.
    weight = torch.randn(vocab, SIZE["hidden_size"]) * LOGIT_STD / SIZE["hidden_size"] ** 0.5
    model.get_output_embeddings().weight = torch.nn.Parameter(weight)
    return prepare_backbone(model)


def decode(model: Any, args: argparse.Namespace, kind: type[MaskRecord], options: dict[str, float]) -> Any:
    """Return milliseconds per decode step and the rollout."""
    decoder.MaskRecord = kind  # type: ignore[misc]
    prompts = torch.randint(3, args.vocab, (args.rows, 12), generator=torch.Generator().manual_seed(0))
    started_at = time.process_time()
    rollout = sample(model, prompts, CACHE, args.tokens, **options)  # type: ignore[arg-type]
    return 1000 * (time.process_time() - started_at) / args.tokens, rollout


def decode_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    model, found = make_model(args.vocab), []
    Unrecorded.n_tokens = args.tokens
    for name, options in TRUNCATIONS.items():
        times: dict[type[MaskRecord], list[float]] = {Unrecorded: [], MaskRecord: []}
        for number in range(args.rounds + 1):
            for kind, values in times.items():
                ms, rollout = decode(model, args, kind, options)
                if number > 0:  # the first round warms up
                    values.append(ms)
        masks = rollout.sampling_masks
        n_tokens = int(rollout.response_mask.sum())
        without, with_record = (statistics.median(values) for values in times.values())
        found.append(
            {
                "part": "decode",
                "sampling": name,
                "unrecorded_ms": without,
                "recorded_ms": with_record,
                # Rounds alternate, so the median of their ratios is steadier than the ratio of medians.
                "ratio": statistics.median(b / a for a, b in zip(*times.values(), strict=True)),
                "kept_per_token": args.vocab if masks is None else len(masks.token_ids) / n_tokens,
                "bytes_per_token": rollout.record_bytes.get("sampling_masks", 0) / n_tokens,
            }
        )
    return found


def replay(hidden: Tensor, weight: Tensor, tokens: Tensor, sets: TokenSets | None) -> float:
    """Return milliseconds of log-probs and the gradient of the hidden states."""
    started_at = time.process_time()
    head: Callable[[Tensor], Tensor] = lambda rows: F.linear(rows, weight)  # noqa: E731
    logps = token_logps(hidden, head, tokens, 1.0, len(weight), head_is_frozen=True, sets=sets)
    logps.sum().backward()
    return 1000 * (time.process_time() - started_at)


def replay_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.positions, 256, generator=generator, requires_grad=True)
    weight = torch.randn(args.vocab, 256, generator=generator)
    cases: dict[str, tuple[Tensor, TokenSets | None]] = {}
    for name, sizes in SETS.items():
        if sizes is None:
            cases[name] = torch.randint(args.vocab, (args.positions,), generator=generator), None
            continue
        counts = torch.randint(sizes[0], sizes[1] + 1, (args.positions,), generator=generator)
        ids = [torch.randperm(args.vocab, generator=generator)[:n] for n in counts.tolist()]
        cases[name] = torch.stack([row[0] for row in ids]), TokenSets(counts.int(), torch.cat(ids).int())
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(args.rounds + 1):
        for name, (tokens, sets) in cases.items():
            ms = replay(hidden, weight, tokens, sets)
            if number > 0:
                times[name].append(ms)
    return [{"part": "replay", "sets": name, "ms": statistics.median(ms)} for name, ms in times.items()]


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--rows", type=int, default=16, help="responses at a time")
    parser.add_argument("--tokens", type=int, default=40, help="of each response")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--positions", type=int, default=512, help="tokens that are replayed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-record", action="store_true", help="print alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoded, replayed = decode_rows(args), replay_rows(args)
    print(
        text_table(
            ["sampling", "ms per step", "with the record", "ratio", "tokens kept", "bytes per token"],
            [
                [row["sampling"], *(f"{row[name]:.{digits}f}" for name, digits in DIGITS.items())]
                for row in decoded
            ],
        )
    )
    print(text_table(["replay over", "ms"], [[row["sets"], f"{row['ms']:.1f}"] for row in replayed]))
    print(
        f"{args.rows} rows, {args.tokens} tokens, vocabulary {args.vocab}, {args.positions} replayed tokens"
    )
    if not args.no_record:
        sizes = {name: getattr(args, name) for name in ("rows", "tokens", "vocab", "positions", "rounds")}
        for row in decoded + replayed:
            record.append("sampling_masks", row | sizes)


if __name__ == "__main__":
    main()
