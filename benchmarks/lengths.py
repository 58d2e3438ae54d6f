"""Time per token of rollout and learner by the length of the sequence, under a budget that stays the same.

    python benchmarks/lengths.py --record [--tokens 4096 ... 131072]
    python benchmarks/lengths.py --report                    tables and picture of what has been recorded

A tiny model of random weights reads two rows under h2o with 128 keys, a chunk as long as an interval at a
time, and samples their last tokens; the learner replays them, forward and backward. Both are microseconds of
this process on one thread, whatever its neighbours do, for each token of a row: the rollout's of the tokens
that it samples at the end, the learner's of the whole row. The largest difference of log-probs is printed.
Then shadow attention alone, forward and backward, beside torch's causal attention over all keys, with the
heads of Qwen2.5-0.5B: the least of several calls in turn.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import command_line
import record
import torch
from kernel_parts.evictions import Schedule, simulate_evictions
from learner import PRESETS
from sampled import sample
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, prepare_backbone, replay_logps
from lit_rlkv.kernels.shadow_attention import plan_slots, shadow_attention
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.reporting.tables import markdown_table

NAME, ATTENTION = "lengths", "lengths_attention"
TOKENS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
N_ROWS, N_NEW, N_WARM = 2, 192, 64
"""N_NEW tokens are sampled, of which the first are not timed."""
CACHE = CacheSpec("h2o", budget=128, interval=64, sink=4, window=16)
ATTENTION_TOKENS = (512, 1024, 2048, 4096)
N_HEADS, N_KV_HEADS, DIM = 14, 2, 64
PICTURE = record.ROOT / "docs" / "results" / "pictures" / "lengths.png"


def make_model(max_len: int) -> PreTrainedModel:
    sizes = dict(PRESETS["tiny"])
    torch.manual_seed(0)
    return prepare_backbone(
        tiny_qwen3(sizes.pop("vocab_size"), 0, 1, max_position_embeddings=max_len, **sizes).eval()
    )


def measure(length: int) -> dict[str, Any]:
    """Return the row of a length."""
    model = make_model(length)
    prompts = torch.randint(2, 512, (N_ROWS, length - N_NEW), generator=torch.Generator().manual_seed(1))
    moments: list[tuple[int, float]] = []

    def note(n_sampled: int) -> None:
        n_before = moments[-1][0] if moments else 0
        moments.append((n_before + n_sampled // N_ROWS, time.process_time()))

    rollout = sample(model, prompts, CACHE, N_NEW, on_progress=note, prefill_chunk=CACHE.interval)
    first, last = next(moment for moment in moments if moment[0] >= N_WARM), moments[-1]
    sampled_s = (last[1] - first[1]) / (last[0] - first[0])
    return {"tokens": length, "rollout_us": 1e6 * sampled_s, **learner(model, rollout)}


def learner(model: PreTrainedModel, rollout: Rollout) -> dict[str, float]:
    """Return microseconds of the learner's step for each token of a row, and the largest gap in nats."""
    started_at = time.process_time()
    logps = replay_logps(model, rollout)
    logps.sum().backward()
    seconds = time.process_time() - started_at
    gap = (logps.detach() - rollout.rollout_logps)[rollout.response_mask].abs().max()
    return {"learner_us": 1e6 * seconds / rollout.input_ids.shape[1], "gap": float(gap)}


def attention(n_tokens: int, n_rounds: int) -> dict[str, Any]:
    """Return milliseconds of forward and backward of shadow attention and of dense causal attention."""
    draw = torch.Generator().manual_seed(0)
    heads = (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    given = [torch.randn(1, n, n_tokens, DIM, generator=draw).requires_grad_() for n in heads]
    upstream = torch.randn(1, N_HEADS, n_tokens, DIM, generator=draw)
    schedule = Schedule(CACHE.budget, CACHE.interval, CACHE.sink, CACHE.window, prompt=64)
    evicted_at = simulate_evictions((1, N_KV_HEADS), n_tokens, schedule)
    plan = plan_slots(evicted_at[:, None])

    def shadow(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = None if plan is None else plan.layer(0)
        return shadow_attention(query, key, value, evicted_at, DIM**-0.5, plan=layer)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def milliseconds(attend: Callable[..., Tensor]) -> float:
        started_at = time.process_time()
        torch.autograd.grad(attend(*given), given, upstream)
        return 1e3 * (time.process_time() - started_at)

    turns = [(milliseconds(shadow), milliseconds(dense)) for _ in range(n_rounds)]
    shadow_ms, dense_ms = (min(times) for times in zip(*turns, strict=True))
    return {"tokens": n_tokens, "shadow_ms": shadow_ms, "dense_ms": dense_ms}


def last(name: str) -> list[dict[str, Any]]:
    """Return the last row of each length."""
    by_length = {row["tokens"]: row for row in record.rows(name)}
    return [by_length[length] for length in sorted(by_length)]


def tables(rows: Sequence[dict[str, Any]], attended: Sequence[dict[str, Any]]) -> str:
    """Return both tables, in Markdown."""
    ours = [
        [f"{row['tokens']:,}", f"{row['rollout_us']:.0f}", f"{row['learner_us']:.0f}", f"{row['gap']:.0e}"]
        for row in rows
    ]
    alone = [[f"{row['tokens']:,}", f"{row['shadow_ms']:.1f}", f"{row['dense_ms']:.1f}"] for row in attended]
    return "\n\n".join(
        [
            markdown_table(["tokens", "rollout, µs per token", "learner, µs per token", "gap"], ours),
            markdown_table(["tokens", "shadow attention, ms", "all keys, ms"], alone),
        ]
    )


def draw(rows: Sequence[dict[str, Any]]) -> None:
    """Draw the time per token by length, over that of the shortest one."""
    from lit_rlkv.reporting.plots import style

    figure, axes = style.single_axes("tokens of a sequence", "time per token, of the first")
    lengths = [row["tokens"] for row in rows]
    for place, name in enumerate(("rollout", "learner")):
        values = [row[f"{name}_us"] / rows[0][f"{name}_us"] for row in rows]
        axes.plot(lengths, values, color=style.run_color(place), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.set_ylim(bottom=0)
    style.legend(axes)
    figure.savefig(PICTURE, dpi=150)
    print(f"written: {PICTURE}")


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--attention", type=int, nargs="*", default=ATTENTION_TOKENS, help="its lengths")
    parser.add_argument("--rounds", type=int, default=5, help="calls of attention alone")
    parser.add_argument("--report", action="store_true", help="print tables and picture, measure nothing")
    args: argparse.Namespace = parser.parse_args()
    if args.report:
        print(tables(last(NAME), last(ATTENTION)))
        draw(last(NAME))
        return
    torch.set_num_threads(1)
    attended = [attention(n_tokens, args.rounds) for n_tokens in args.attention]
    for row in attended:
        record.append(ATTENTION, row)
    rows = []
    for length in sorted(args.tokens):
        rows.append(measure(length))
        record.append(NAME, rows[-1])
        print(" ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print(tables(rows, attended))


if __name__ == "__main__":
    main()
