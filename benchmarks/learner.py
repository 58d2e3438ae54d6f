"""Cost of a learner's step by budget and length: log-probs under replay, and their backward pass.

    python benchmarks/learner.py --record
    python benchmarks/learner.py --preset 1.5b --layers 4 --lengths 4096 16384 --budgets 1024 2048 4096
    python benchmarks/learner.py --levers frozen frozen+compiled frozen+host      what a run can have
    python benchmarks/learner.py --levers frozen+host --lengths 65536 131072 --rounds 1 --skip-dense
    python benchmarks/learner.py --profile --lengths 16384 --budgets 1024         where the time goes

A decoder of random weights reads a synthetic rollout with the evictions of a simulated h2o, forward and
backward with respect to all its weights. The views: `torch dense` is the model's own causal attention by
torch's SDPA, which knows no evictions; `dense` is replay_logps with every key alive; `shadow` is replay_logps
under the evictions, as a learner of evicting rollouts needs it, at each budget. Kernels are the plain
definitions or Triton's. Levers, joined by +, apply to every view alike: `frozen` trains LoRA adapters alone,
of rank 32 on all linear layers; `compiled` runs each layer as torch.compile makes it; `checkpoints` keeps the
inputs of layers alone, and `host` keeps these in host memory.

Before anything is timed, log-probs and gradients of both kernels are compared at a length that the
definitions can take. Printed are seconds of a step, tokens per second, the peak of memory above the weights,
and the wall-clock of the first step. `--profile` prints instead which operations take most of the device's
time. `--record` keeps a row for each length at
once; started again with it, it measures the lengths that this machine and version of the package have no row
for. A view that runs out of memory is named in its row; the others are measured.

Without CUDA the model is tiny, and Triton's kernels are interpreted for the comparison and not timed.
"""

import allocator  # noqa: F401  # isort: skip  (before torch)

import argparse

import command_line
from kernels import prepare_triton
from shapes import QWEN_1_5B

PRESETS = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    },
    "1.5b": QWEN_1_5B | {"head_dim": 128},
}
"""Decoders as presets.tiny_qwen3 builds them."""
LEVERS = ("frozen", "compiled", "checkpoints", "host")
DEFAULTS = {
    "cpu": {"preset": "tiny", "lengths": [96, 192, 384], "budgets": [16, 48], "interval": 8, "prompt": 16},
    "cuda": {
        "preset": "1.5b",
        "lengths": [4096, 8192, 16_384],
        "budgets": [1024, 2048, 4096],
        "interval": 128,
        "prompt": 300,
    },
}


def main() -> None:
    args = parse_arguments()
    prepare_triton(args.device)
    from kernel_parts import (
        learner as kernel_learner,  # not at the top: Triton reads its environment when it is imported
    )

    kernel_learner.run(args, PRESETS[args.preset])


def levers(text: str) -> tuple[str, ...]:
    """Return the levers of `a+b`; of `none` there are none."""
    found = tuple(text.split("+")) if text != "none" else ()
    if unknown := set(found) - set(LEVERS):
        raise argparse.ArgumentTypeError(f"no levers: {sorted(unknown)}; there are {', '.join(LEVERS)}, none")
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(__doc__, "learner")
    command_line.add_device_option(parser)
    parser.add_argument("--preset", choices=PRESETS, help="default: 1.5b on CUDA, tiny on a CPU")
    parser.add_argument("--layers", type=int, help="fewer than the preset has")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sequence")
    parser.add_argument("--budgets", type=int, nargs="+", help="keys that survive a compaction")
    parser.add_argument("--interval", type=int, help="tokens between compactions")
    parser.add_argument("--prompt", type=int, help="tokens of each sequence that are no actions")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--levers", nargs="+", type=levers, default=[()], metavar="LEVER+LEVER")
    parser.add_argument("--skip-dense", action="store_true", help="leave out the views of all keys")
    parser.add_argument("--profile", action="store_true", help="print what takes the time, and time nothing")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way")
    command_line.add_restart_options(parser)
    args = command_line.complete(parser.parse_args(arguments))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
