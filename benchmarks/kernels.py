"""Speed of the Triton kernels, against the machine's limits and against alternatives.

    python benchmarks/kernels.py --record
    python benchmarks/kernels.py --ops shadow_attention --only "16384 tokens" --rounds 20 [--skip-flex]
    python benchmarks/kernels.py --ops shared_prompt --rounds 5    # table 1 of DualKV (arXiv:2605.15422)

Each case is first proven right against its definition, and refused if it is not; then it and its comparisons
are timed in turns. Printed are the median and the 10th and 90th percentile in milliseconds, the time over
that of the first way, which is ours, bytes and flops by formula (kernel_parts/counts.py) as rates and as a
share of what copies of large buffers and a product of 8192 x 8192 matrices in bfloat16 reach in the same run,
the wall-clock of the first call with compilation (if TRITON_CACHE_DIR is not set), and the most memory above
the inputs. On CUDA caches are flushed before each call. `--record` keeps a row for
each case at once; started again with it, it measures the cases that this machine and version of the package
have no row for.

Without CUDA the sizes are toys and the Triton kernels run in Triton's interpreter, to be proven right only:
what is timed is the plain definition.
"""

import argparse
import os
import tempfile

import command_line

# transformers asks a package of this name for its version, and from a script beside this file it finds this
__version__ = "0"

OPS = (
    "decode_attention",
    "evict",
    "slot_scores",
    "shadow_attention",
    "shared_prompt",
    "token_logps",
    "token_sampling",
)


def main() -> None:
    args = parse_arguments()
    prepare_triton(args.device)
    from kernel_parts import (
        run as kernel_run,  # not at the top: Triton reads its environment when it is imported
    )

    kernel_run.run(args)


def prepare_triton(device: str) -> None:
    """Interpret kernels where there is no GPU; elsewhere compile them anew, or as the environment says."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        for cache in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            if cache not in os.environ:
                os.environ[cache] = tempfile.mkdtemp()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(__doc__, "kernels")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose label contains it; _ stands for a space"
    )
    parser.add_argument(
        "--skip-flex", action="store_true", help="leave out FlexAttention, which takes a minute to compile"
    )
    command_line.add_device_option(parser)
    parser.add_argument("--size", choices=("real", "toy"), help="default: real on CUDA, toy on a CPU")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each way")
    command_line.add_restart_options(parser)
    args = command_line.complete(parser.parse_args(arguments))
    args.only = args.only.replace("_", " ")
    args.size = args.size or ("real" if args.device == "cuda" else "toy")
    return args


if __name__ == "__main__":
    main()
