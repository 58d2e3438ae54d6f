"""The most tokens per second that memory bandwidth allows a decoder, with all keys and with a budget.

    python benchmarks/ceiling.py [--card H100] [--model 1.5b] [--rows 256] [--prompt 256] [--tokens 8192]
                                 [--budgets 512 1024 2048 4096] [--interval 128]

A step of decoding reads all weights once, and of each row all keys and values that it holds; its time is at
least these bytes over the bandwidth of the card's memory. Printed is the mean over a response, during which
all keys grow from the prompt's to the last one's, and an evicting cache stays between its budget and an
interval above it. FP8 keys have a scale of two bytes for each key and value of a head. No arithmetic, launch
or sampling is counted, so that every engine stays below; what ours reaches is in docs/results/gpu.md.
"""

import argparse

import command_line
from shapes import QWEN_0_5B, QWEN_1_5B, QWEN_4B
from text_table import text_table

from lit_rlkv.planning.cards import CARDS
from lit_rlkv.planning.seconds import mean_keys

MODELS = {
    "0.5b": QWEN_0_5B | {"n_weights": 494_032_768, "head_dim": 64},
    "1.5b": QWEN_1_5B | {"n_weights": 1_543_714_304, "head_dim": 128},
    "4b": QWEN_4B | {"n_weights": 4_022_468_096, "head_dim": 128},
}


def tokens_per_second(
    shape: dict[str, int], bandwidth: float, rows: int, n_keys: float, *, is_fp8: bool = False
) -> float:
    """Return the ceiling for rows that each read `n_keys` keys of every layer and KV head."""
    of_head = shape["head_dim"] + 2 if is_fp8 else 2 * shape["head_dim"]
    of_key = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * of_head
    return rows * bandwidth / (2 * shape["n_weights"] + rows * n_keys * of_key)


def table(args: argparse.Namespace) -> list[list[str]]:
    """Return a row for all keys in 16 and 8 bits and for each budget: mean keys, tokens/s, times all keys."""
    shape, bandwidth = MODELS[args.model], CARDS[args.card].bandwidth
    every = mean_keys(args.prompt, args.tokens, None)
    cases = [("all keys, bf16", every, False), ("all keys, FP8", every, True)]
    for budget in args.budgets:
        n_keys = mean_keys(args.prompt, args.tokens, budget + args.interval / 2)
        cases.append((f"budget {budget}, bf16", min(n_keys, every), False))
    speeds = [tokens_per_second(shape, bandwidth, args.rows, n, is_fp8=fp8) for _, n, fp8 in cases]
    return [
        [name, f"{n:,.0f}", f"{speed:,.0f}", f"{speed / speeds[0]:.2f}"]
        for (name, n, _), speed in zip(cases, speeds, strict=True)
    ]


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--model", choices=MODELS, default="1.5b")
    parser.add_argument("--rows", type=int, default=256, help="responses at a time")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a response")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--interval", type=int, default=128, help="tokens between compactions")
    args = parser.parse_args()
    print(text_table(["cache", "keys in the mean", "tokens/s", "times all keys"], table(args)))


if __name__ == "__main__":
    main()
