"""Replay gap: log-probs of a rollout as the learner replays them, minus the sampler's, part by part.

    python benchmarks/replay_gap.py [--preset 1.5b|tiny] [--dtypes bfloat16 float32] [--record]
    python benchmarks/replay_gap.py --model models/gemma-3-270m-q4_k_m.gguf --dtypes float32 --budget 256 \
        --policies h2o snapkv --batch 2 --prompt 1792 --new 256 [--show]
    python benchmarks/replay_gap.py --part logits|choices|codes [--record]

*evictions*: a model of random weights, or a pretrained one (GGUF file or checkpoint folder) on text of this
repository, samples under an evicting cache; one forward then replays the rollout. Printed are mean, 99th
percentile and largest value of |replayed − sampled| over all response tokens, in nats; the mean of the same
for a rollout that evicts nothing, which is rounding alone; and, as a control, for a learner that sees every
key. `--show` prints instead how a pretrained model goes on with the first prompt, greedily, with all keys and
under each policy.

*logits*: a small random model by precision, with logits in float32, which the package computes from 16-bit
operands, and rounded to 16 bit, as a plain `nn.Linear` has them.

*choices*: small random mixtures of experts sample under an evicting cache with top_k and top_p. The same
weights replay evictions, sampling masks and experts, all but one, or none. Printed are the bytes of each
record, and the gaps: the mean over seeds, and the largest of all tokens.

*codes*: a pretrained model (`--model`; `make smollm2` fetches the default one) with quantized keys and
values. Printed is the gap of the learner by the record of the codes that it has: a bit for each code, check
bits for every 16 or 64 codes (marked: those that rollouts keep), none, and of one that does not quantize;
with the bytes that a record takes of a key and its value of 128 dimensions, and the tokens of a row up to
which that is less than quantization saves in 1,024 + 128 slots. In float32 it prints as well the KL to the
exact model, in nats per token, of rounding every key and value, also with planted outlier channels: two RoPE
pairs of each KV head with keys 8 times as large, and queries so much smaller.

`--record` keeps rows, of logits in rounded_logits.jsonl, of choices in recorded_choices.jsonl and of codes in
quantized_cache.jsonl; started again with it, evictions and codes measure what has no row yet.
"""

import allocator  # noqa: F401  # isort: skip  (before torch)

import argparse
from pathlib import Path

import command_line
import torch
from replay_parts import choices, codes, evictions, logits
from rollout_parts.setting import PRESETS

from lit_rlkv.kvcache.policies import UNTRAINED

PARTS = {"evictions": evictions, "logits": logits, "choices": choices, "codes": codes}


def parse() -> argparse.Namespace:
    parser = command_line.Parser(__doc__, evictions.NAME)
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--part", choices=PARTS, default="evictions")
    parser.add_argument("--device", help="default: cuda if there is one; of logits and choices cpu")
    parser.add_argument("--preset", choices=PRESETS, default="1.5b" if has_cuda else "tiny")
    parser.add_argument(
        "--model", type=Path, help="GGUF file or checkpoint folder, instead of random weights"
    )
    parser.add_argument("--policies", nargs="+", choices=UNTRAINED, default=["h2o"])
    parser.add_argument("--dtypes", nargs="+", choices=evictions.DTYPES, default=list(evictions.DTYPES))
    parser.add_argument("--kernels", default="auto", help="auto, reference or triton")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--batch", type=int, help="sequences; default: 8, of codes 2")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a pretrained model's prompts")
    parser.add_argument("--show", action="store_true", help="print texts, and measure nothing")
    parser.add_argument(
        "--new", type=int, help="tokens of a response; default: a quarter of the preset's, or the part's own"
    )
    parser.add_argument("--seeds", type=int, default=3, help="models and rollouts of choices")
    command_line.add_restart_options(parser)
    args = parser.parse_args()
    args.device = args.device or ("cuda" if has_cuda and args.part in ("evictions", "codes") else "cpu")
    args.batch = args.batch or (2 if args.part == "codes" else 8)
    return args


def main() -> None:
    args = parse()
    PARTS[args.part].run(args)


if __name__ == "__main__":
    main()
