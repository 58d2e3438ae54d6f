"""A GRPO step of every method at the size of real models: what the owner of one GPU compares.

    python benchmarks/one_gpu.py --record [OVERRIDES] [--shapes 0.5b] [--lengths 2048] [--methods smd]
    python benchmarks/one_gpu.py --record model.path=Qwen/Qwen3-4B --shapes 4b      a real model of this shape
    python benchmarks/one_gpu.py --page                                    write docs/results/one_gpu.md

Each cell is a run of the package's own loop (LoRA adapters on a frozen base of 16 or of 4 bits): a first
iteration, which compiles, and a second one. Measured are tokens per second of the rollout, seconds of the
learner (scoring and update) and peak memory. Without a `model.path` weights are random, kept in --folder, and
no response ends before its length. The command stops after `--minutes`: a rollout that is cut off is
extrapolated from its last half, a step that is cut off has no seconds. `--record` keeps rows at once; started
again, the command measures the cells that are missing, and those that were cut off unless they had all its
time. What cannot run is a row with the reason.

Needs the package installed, and for 4 bits its extra `quant`. --toy runs it all at toy size on a CPU.
"""

import allocator  # noqa: F401  # isort: skip  (before torch)

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import command_line
import record
import torch
from kernel_parts.case import Refusal, reason, release
from kernel_parts.timing import is_device_lost, synchronize
from one_gpu_parts.page import METHODS, NAME, PAGE, RESPONSES, Row, cell_name, latest, table, written
from peers import write_model
from peers_parts.our_steps import Digits, train_here
from rollout_parts.ours import OutOfTimeError, Progress
from shapes import QWEN_0_5B, QWEN_1_5B, QWEN_4B
from time_limit import TimeLimit

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config import composed
from lit_rlkv.out_of_memory import is_out_of_memory
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run

SHAPES = {
    "0.5b": QWEN_0_5B | {"head_dim": 64},
    "1.5b": QWEN_1_5B | {"head_dim": 128},
    "4b": QWEN_4B | {"head_dim": 128},
}
CACHE = ("cache.policy=h2o", "cache.budget=1024", "cache.interval=128", "cache.sink=4", "cache.window=16")
TOY_SHAPES = {"toy": {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}}
TOY_RESPONSES = {24: 4}
TOY_CACHE = ("cache.policy=h2o", "cache.budget=8", "cache.interval=4", "cache.sink=1", "cache.window=2")
GROUP_SIZE, N_ITERATIONS = 2, 2


class Watch(RLCallback):
    """Records each iteration of a cell, and its rollout before the update; raises OutOfTimeError at the end.

    Args:
        row: entries that tell the cell from the others.
    """

    def __init__(self, row: Row, limit: TimeLimit, device: torch.device) -> None:
        self.row, self.limit, self.device = row, limit, device
        self.progress, self.sampled_at = Progress(limit), 0.0
        self.has_noted = False

    def on_phase_start(self, phase: str, iteration: int) -> None:
        synchronize(self.device)
        if phase == "rollout":
            self.progress = Progress(self.limit)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        if phase != "rollout":
            if self.limit.is_over:
                raise OutOfTimeError
        elif n_done > 0:
            try:
                self.progress(int(n_done) - self.progress.n_tokens[-1])
            except OutOfTimeError:
                if self.row["n_iterations"] == 0 and n_done < n_total:
                    self.note(tokens_per_s=n_total / self.progress.whole_s(n_total), integrated=True)
                raise

    def on_phase_end(self, phase: str, iteration: int) -> None:
        synchronize(self.device)
        if phase == "rollout":
            self.sampled_at = time.perf_counter()

    def on_rollout_end(self, experience: Any) -> None:
        n_tokens = int(experience.rollout.response_mask.sum())
        seconds = self.sampled_at - self.progress.seconds[0]
        self.rollout = {"tokens_per_s": n_tokens / seconds, "rollout_s": seconds, "n_tokens": n_tokens}
        self.rollout |= {"kv_mib": experience.rollout.kv_bytes / 2**20, "integrated": False}
        if self.row["n_iterations"] == 0:
            self.note(**self.rollout)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self.row["n_iterations"] = iteration
        self.note(**self.rollout, learner_s=time.perf_counter() - self.sampled_at)
        if self.limit.is_over:
            raise OutOfTimeError

    def note(self, **figures: Any) -> None:
        """Record the row with these figures."""
        self.has_noted = True
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else None
        record.append(NAME, self.row | {"peak_mib": peak} | figures)
        print(f"{cell_name(self.row)}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)


def measure(args: argparse.Namespace, key: Row, limit: TimeLimit, *, is_first: bool) -> None:
    """Record the rows of one cell, or why there are none.

    Raises:
        Exception: the device is lost, so that no other cell could be measured.
    """
    row = key | {"n_iterations": 0, "is_first": is_first}
    try:
        with tempfile.TemporaryDirectory() as folder:
            watch = Watch(row, limit, torch.device(args.device))
            train_here(run_of(args, key, Path(folder)), watch)
    except OutOfTimeError:
        if is_first and not watch.has_noted:  # the next start would not get further
            record.append(NAME, row | vars(Refusal("no token within the time of a start", False)))
        print(f"{cell_name(key)}: out of time; start again to go on", flush=True)
    except Exception as error:
        found = Refusal(reason(error), is_out_of_memory(error))
        record.append(NAME, row | vars(found))
        print(f"{cell_name(key)}: {found.in_short}", flush=True)
        if is_device_lost():
            raise
    release(args.device)


def run_of(args: argparse.Namespace, key: Row, folder: Path) -> Run:
    """Return a cell's run."""
    n_tokens, overrides = key["length"], list(args.overrides)
    if not any(text.startswith("model.path=") for text in overrides):
        overrides.append(f"model.path={random_model(args, key['shape'])}")
    settings = [
        *("stages=[rl]", f"experiment={key['method']}", "roles=hydra", "model.preset=null"),
        *(f"runs_dir={folder}", *args.cache, f"fabric.accelerator={args.device}", "diagnostics=none"),
        f"rollout.n_prompts={args.responses[n_tokens] // GROUP_SIZE}",
        *(f"algorithm.group_size={GROUP_SIZE}", f"rollout.max_new_tokens={n_tokens}"),
        *("algorithm.n_minibatches=1", f"algorithm.n_iterations={N_ITERATIONS}"),
        f"callbacks.checkpoint_every={N_ITERATIONS}",
    ]
    settings += [] if args.toy else ["fabric.precision=bf16-true", "roles.gradient_checkpointing=true"]
    settings += ["fabric.quantization=4bit"] if key["bits"] == 4 else []
    cfg = composed("config", [*settings, *overrides])
    del cfg.hydra
    run = Run(checked_config(cfg), folder=folder / "run")
    run.task = Digits()
    return run


def random_model(args: argparse.Namespace, shape: str) -> Path:
    """Return the folder of a model of random weights, written at the first call."""
    folder: Path = args.folder / shape
    if not folder.is_dir():
        sizes = args.all_shapes[shape] | {"max_position_embeddings": 2 * max(args.responses)}
        with tempfile.TemporaryDirectory(dir=args.folder) as new, torch.device(args.device):
            # Where it was interrupted there is no folder of this name.
            write_model(Path(new) / shape, sizes.pop("vocab_size"), **sizes)
            (Path(new) / shape).rename(folder)
    return folder


def is_done(row: Row | None) -> bool:
    """True if a cell is whole, cannot run, or had the whole time of a command."""
    return row is not None and (row["n_iterations"] == N_ITERATIONS or "reason" in row or row["is_first"])


def cells(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the keys of all cells: what every GPU can do first, and of a table one column after another."""
    for length, bits, shape, method in product(args.lengths, args.bits, args.shapes, args.methods):
        key = {"shape": shape, "bits": bits, "length": length, "method": method}
        yield key | {"overrides": args.overrides, "responses": args.responses[length]}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(__doc__, NAME)
    is_toy = "--toy" in (sys.argv[1:] if arguments is None else arguments)
    shapes, responses = (TOY_SHAPES, TOY_RESPONSES) if is_toy else (SHAPES, RESPONSES)
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes))
    parser.add_argument("--lengths", nargs="+", type=int, choices=responses, default=list(responses))
    parser.add_argument("--bits", nargs="+", type=int, choices=(16, 4), default=[16, 4], help="of the base")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--folder", type=Path, default=Path("runs/one_gpu"), help="of random weights")
    parser.add_argument("--page", action="store_true", help="write the page of the record, measure nothing")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU; the figures mean nothing")
    command_line.add_restart_options(parser)
    parser.set_defaults(minutes=8.0, device="cpu" if is_toy else "cuda", all_shapes=shapes)
    parser.set_defaults(responses=responses, cache=TOY_CACHE if is_toy else CACHE)
    args, args.overrides = parser.parse_known_args(arguments)
    if any(text.startswith("-") for text in args.overrides):
        parser.error(f"options that do not exist, or overrides: {' '.join(args.overrides)}")
    if any(text.startswith("model.path=") for text in args.overrides) and len(args.shapes) > 1:
        parser.error("model.path is one model; name its shape with --shapes")
    if not (args.toy or args.page or torch.cuda.is_available()):
        parser.error("torch sees no GPU; --toy runs everything at toy size on a CPU")
    return args


def main() -> None:
    args = parse()
    if args.page:
        PAGE.write_text(written(record.rows(NAME)), encoding="utf-8")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    limit = TimeLimit(args.minutes)
    found = {cell_name(key): record.find(NAME, **key) for key in cells(args)}
    todo = [key for key in cells(args) if args.again or not is_done(found[cell_name(key)])]
    # What has no row comes before what was cut off.
    for number, key in enumerate(sorted(todo, key=lambda key: found[cell_name(key)] is not None)):
        if not limit.is_over:
            measure(args, key, limit, is_first=number == 0)
    n_left = sum(not is_done(record.find(NAME, **key)) for key in cells(args))
    print(f"{n_left} cells are left; start again to go on" if n_left else "all cells are measured")
    print("\n".join(table(latest(record.rows(NAME)), shape) for shape in args.shapes))


if __name__ == "__main__":
    main()
