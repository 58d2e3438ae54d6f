"""Seconds of a GRPO step on a CPU, beside TRL's GRPOTrainer: full fine-tuning with both.

    python benchmarks/peers.py [--trl-python PYTHON] [--rounds 9] [--record]     this project's own loop
    python benchmarks/peers.py --inside-trl [--rounds 9] [--record]              its EvictingGRPOTrainer
    python benchmarks/peers.py --lengths 256 1024 2048 [--rounds 2] [--record]   both, at long responses
    python benchmarks/peers.py --table                        the rows of the last records, as in the docs

The same model of random weights, tokenizer, prompts, reward, number of responses and tokens, AdamW, and one
thread. Each trainer has a process of its own. Seconds are the process's own on the processor, which other
work on the machine does not lengthen; steps of all trainers alternate, because it slows caches and memory.
The embedding of the end token is such that it is never sampled: all responses have the same length.

The model is the Qwen3 of the default run with four layers. With `--lengths` it has `--layers` of the 30 of
SmolLM2-135M's shape and as small a share of its vocabulary, so that layers and head have their shares of the
work; 16 responses, of which the first step is not counted unless it is the only one; memory is the peak of
the whole process. `--record` keeps rows in peers.jsonl, trl_side_by_side.jsonl or peers_long.jsonl.

TRL runs with any Python that has `trl` and `datasets`:

    python -m venv trl-env && trl-env/bin/pip install trl datasets
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import record
import torch
from peers_parts.our_steps import Digits
from shapes import SMOLLM2
from text_table import text_table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import EOS_TOKEN, build_task_tokenizer
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.rng import derive_seed

NAME, INSIDE_TRL, LONG = "peers", "trl_side_by_side", "peers_long"
"""Records: of this project's loop, of its trainer inside TRL, and of long responses."""
PHASES = ("generate", "score", "update", "total")
TRL = "TRL"
N_LAYERS, N_WARM = 4, 2
"""Layers of the model, and first steps, which are not counted; with `--lengths` other numbers."""
SIZES = {"n_prompts": 16, "group_size": 8, "max_new_tokens": 40}
LONG_SIZES = {"n_prompts": 2, "group_size": 8}
OPTIMIZER = {"lr": 1e-5, "betas": (0.9, 0.98), "clip": 0.2, "max_grad_norm": 1.0}
Caches = dict[str, Any]
"""Cache of each trainer: None for TRL's own, fields of EvictingGRPOConfig, or settings of this project."""
CACHES: Caches = {
    "all keys": ["cache.policy=dense"],
    "random 16+5": ["cache.policy=random", "cache.budget=16", "cache.interval=5"],
}
EVICTING: Caches = {
    TRL: None,
    "all keys": {"cache_policy": "dense"},
    "random 16+5": {"cache_policy": "random", "cache_budget": 16, "cache_interval": 5, "cache_window": 8},
    "snapkv 16+5": {"cache_policy": "snapkv", "cache_budget": 16, "cache_interval": 5, "cache_window": 8},
}
AT_LENGTH: Caches = {
    TRL: None,
    "TRL, evicting": {"cache_policy": "h2o", "cache_budget": 128, "cache_interval": 32},
    "lit_rlkv, all keys": ["cache.policy=dense"],
    "lit_rlkv, h2o 128+32": ["cache.policy=h2o", "cache.budget=128", "cache.interval=32"],
}
FAR = 5.0
"""Coordinate that keeps the end token's logit far below all others."""


@dataclass(frozen=True)
class Step:
    """Seconds on the processor of the parts of a step by `PHASES`, and the tokens that it sampled."""

    seconds: dict[str, float]
    n_tokens: int
    peak_mib: int = 0
    """Most memory that a process of its own has held so far."""


def write_model(folder: Path, n_tokens: int | None = None, **shape: int) -> None:
    """Write a Qwen3 of random weights that never samples its end token, with its tokenizer.

    Args:
        n_tokens: of the vocabulary; None: those of the tokenizer.
        shape: arguments of `tiny_qwen3`.
    """
    tokenizer = build_task_tokenizer()
    torch.manual_seed(0)
    shape = {"num_hidden_layers": N_LAYERS} | shape
    model = tiny_qwen3(n_tokens or len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, **shape)
    save_endless(model, tokenizer, folder)


def write_smollm2(folder: Path, n_layers: int) -> None:
    """Write a Llama of so many layers of SmolLM2-135M with its tokenizer; see the module."""
    tokenizer = build_task_tokenizer()
    torch.manual_seed(0)
    n_tokens = SMOLLM2["vocab_size"] * n_layers // SMOLLM2["num_hidden_layers"]
    config = LlamaConfig(
        **SMOLLM2 | {"vocab_size": n_tokens, "num_hidden_layers": n_layers},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    save_endless(LlamaForCausalLM(config), tokenizer, folder)


def save_endless(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model of random weights and its tokenizer; it never samples its end token."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = FAR
        embeddings[tokenizer.convert_tokens_to_ids(EOS_TOKEN), 0] = -FAR
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class TrainerProcess:
    """A trainer in a process of its own, on the model in `folder`.

    Args:
        cache: a value of `Caches`.
        sizes: `n_prompts`, `group_size` and `max_new_tokens` of a step.
    """

    def __init__(
        self, python: str, folder: Path, n_steps: int, cache: Any, sizes: Mapping[str, int], name: str
    ) -> None:
        source = PromptSource(Digits(), split="train", seed=derive_seed(0, "prompts", "rl"))
        settings = {
            **{"n_threads": torch.get_num_threads(), "n_steps": n_steps + 1, "cache": cache or {}},
            **sizes,
            **OPTIMIZER,
            "prompts": [problem.prompt for problem in source.take(sizes["n_prompts"] * n_steps)],
        }
        (folder / "peers.json").write_text(json.dumps(settings))
        script = "our_steps.py" if isinstance(cache, list) else "trl_steps.py"
        self.log = (folder / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            [python, str(Path(__file__).parent / "peers_parts" / script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.steps: list[Step] = []
        said = self._answer()
        self.version, self.n_trained = said["version"], said["n_trained"]

    def step(self) -> None:
        """Run one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(Step(**self._answer()))

    def close(self) -> None:
        """End the process, which waits for its next step."""
        self.process.communicate(timeout=60)
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        # Libraries may print before the script turns standard output away from them.
        line = next((text for text in self.process.stdout if text.startswith("{")), None)
        if line is None:
            self.process.wait()
            self.log.seek(0)
            last = self.log.read().strip().splitlines()[-1:] or ["it wrote nothing"]
            raise SystemExit(f"error: the trainer's process ended: {last[0]}; see --trl-python in --help")
        return dict(json.loads(line))


def run_steps(
    write: Callable[[Path], None], caches: Caches, python: str, n_steps: int, sizes: Mapping[str, int]
) -> dict[str, TrainerProcess]:
    """Write a model and alternate steps of the trainers on it; all of them sampled as many tokens.

    Args:
        python: of TRL's own trainer; the others run with this one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        trainers = {
            who: TrainerProcess(
                python if cache is None else sys.executable, folder, n_steps, cache, sizes, f"trainer{place}"
            )
            for place, (who, cache) in enumerate(caches.items())
        }
        for _ in range(n_steps):
            for trainer in trainers.values():
                trainer.step()
        for trainer in trainers.values():
            trainer.close()
    expected = sizes["n_prompts"] * sizes["group_size"] * sizes["max_new_tokens"]
    assert all(step.n_tokens == expected for each in trainers.values() for step in each.steps)
    return trainers


def medians(steps: Sequence[Step], digits: int = 4) -> dict[str, float]:
    """Return the median seconds of each phase."""
    return {
        phase: round(statistics.median(step.seconds[phase] for step in steps), digits) for phase in PHASES
    }


def times_as_fast(ours: Sequence[Step], theirs: Sequence[Step]) -> dict[str, Any]:
    """Return the median and the range over steps of their time over ours."""
    ratios = [b.seconds["total"] / a.seconds["total"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "times_as_fast": round(statistics.median(ratios), 3),
        "times_as_fast_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def compare(cache: str, python: str, n_rounds: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the row of this project's loop under a cache of `CACHES`, beside TRL's trainer."""
    caches = {TRL: None, cache: [*CACHES[cache], *overrides]}
    trainers = run_steps(write_model, caches, python, N_WARM + n_rounds, SIZES)
    theirs, ours = (trainer.steps[N_WARM:] for trainer in trainers.values())
    return {
        "cache": cache,
        "overrides": list(overrides),
        "trl_version": trainers[TRL].version,
        "n_trained": trainers[TRL].n_trained,
        "n_rounds": n_rounds,
        "seconds": {"ours": medians(ours), "trl": medians(theirs)},
        **times_as_fast(ours, theirs),
    }


def compare_inside(python: str, n_rounds: int) -> dict[str, Any]:
    """Return the row of the trainers inside TRL."""
    trainers = run_steps(write_model, EVICTING, python, N_WARM + n_rounds, SIZES)
    theirs, found = trainers[TRL].steps[N_WARM:], {}
    n_tokens = theirs[0].n_tokens
    for who, trainer in trainers.items():
        seconds = medians(trainer.steps[N_WARM:])
        found[who] = {
            "seconds": seconds,
            "tokens_per_second": round(n_tokens / seconds["total"]),
            "rollout_tokens_per_second": round(n_tokens / seconds["generate"]),
            **times_as_fast(trainer.steps[N_WARM:], theirs),
        }
    described = {"trl_version": trainers[TRL].version, "n_trained": trainers[TRL].n_trained}
    return described | {"n_tokens": n_tokens, "n_rounds": n_rounds, "trainers": found}


def compare_long(n_tokens: int, n_layers: int, python: str, n_rounds: int) -> dict[str, Any]:
    """Return the row of all trainers at one length of the responses."""
    sizes = LONG_SIZES | {"max_new_tokens": n_tokens}
    trainers = run_steps(lambda folder: write_smollm2(folder, n_layers), AT_LENGTH, python, n_rounds, sizes)
    n_warm = min(1, n_rounds - 1)
    found = {
        who: {
            "seconds": medians(trainer.steps[n_warm:], digits=3),
            "peak_mib": max(step.peak_mib for step in trainer.steps),
            **times_as_fast(trainer.steps[n_warm:], trainers[TRL].steps[n_warm:]),
        }
        for who, trainer in trainers.items()
    }
    version = trainers[TRL].version
    return {"n_tokens": n_tokens, "n_layers": n_layers, "trl_version": version, "trainers": found}


def table(row: dict[str, Any]) -> str:
    """Return the seconds of both, and their ratio."""
    ours, theirs = row["seconds"]["ours"], row["seconds"]["trl"]
    rows = [
        [phase, *(f"{1e3 * s[phase]:.0f}" for s in (ours, theirs)), f"{theirs[phase] / ours[phase]:.2f}"]
        for phase in PHASES
    ]
    headings = ["ms per step", f"lit_rlkv, {row['cache']}", f"TRL {row['trl_version']}", "ratio"]
    low, high = row["times_as_fast_range"]
    said = f"{row['times_as_fast']} times as fast as TRL ({low}–{high} over {row['n_rounds']} rounds)"
    return f"{text_table(headings, rows)}\n{said}\n"


def inside_table(row: dict[str, Any]) -> str:
    """Return the table of docs/how-to/inside-trl.md, a line for each trainer."""
    rows = []
    for who, found in row["trainers"].items():
        seconds, (low, high) = found["seconds"], found["times_as_fast_range"]
        rows.append(
            [
                f"TRL {row['trl_version']}" if who == TRL else f"evicting, {who}",
                *(f"{1e3 * seconds[phase]:.0f}" for phase in ("generate", "update", "total")),
                str(found["rollout_tokens_per_second"]),
                str(found["tokens_per_second"]),
                "1" if who == TRL else f"{found['times_as_fast']:.2f} ({low:.2f} to {high:.2f})",
            ]
        )
    headings = ["trainer", "generate, ms", "update, ms", "step, ms"]
    return markdown_table([*headings, "tokens/s, rollout", "tokens/s, step", "of TRL's"], rows)


def long_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/results/kernels.md, a line for each length and trainer."""
    lines = []
    for row in rows:
        for who, found in row["trainers"].items():
            seconds = (f"{found['seconds'][phase]:.1f}" for phase in ("generate", "update", "total"))
            speed = "1" if who == TRL else f"{found['times_as_fast']:.2f}"
            lines.append([str(row["n_tokens"]), who, *seconds, speed, str(found["peak_mib"])])
    headings = ["tokens", "trainer", "generate, s", "update, s", "step, s", "times as fast", "peak, MiB"]
    return markdown_table(headings, lines)


def last_tables() -> str:
    """Return the tables of the last rows of all three records."""
    short = {row["cache"]: row for row in record.rows(NAME)}
    inside, long = record.rows(INSIDE_TRL), {row["n_tokens"]: row for row in record.rows(LONG)}
    return "\n\n".join(
        [
            *map(table, short.values()),
            *map(inside_table, inside[-1:]),
            long_table([long[length] for length in sorted(long)]),
        ]
    )


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--trl-python", default=sys.executable, help="Python with trl; default: this one")
    parser.add_argument("--rounds", type=int, help="steps that are counted; default: 9, of long ones 2")
    parser.add_argument("--only", action="append", choices=CACHES, help="cache of lit_rlkv; default: each")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--inside-trl", action="store_true", help="EvictingGRPOTrainer instead of our loop")
    which.add_argument("--lengths", type=int, nargs="+", help="tokens of a response, for all trainers")
    which.add_argument("--table", action="store_true", help="print the last rows, measure nothing")
    parser.add_argument("--layers", type=int, default=3, help="of 30, with --lengths")
    args, overrides = parser.parse_known_args()
    args.rounds = args.rounds or (2 if args.lengths else 9)
    return args, overrides


def main() -> None:
    args, overrides = parse()
    torch.set_num_threads(1)
    if args.table:
        print(last_tables())
    elif args.inside_trl:
        row = compare_inside(args.trl_python, args.rounds)
        print(inside_table(row))
        record.append(INSIDE_TRL, row)
    elif args.lengths:
        for n_tokens in args.lengths:
            row = compare_long(n_tokens, args.layers, args.trl_python, args.rounds)
            print(long_table([row]), flush=True)
            record.append(LONG, row)
    else:
        for cache in args.only or CACHES:
            row = compare(cache, args.trl_python, args.rounds, overrides)
            print(table(row), flush=True)
            record.append(NAME, row)


if __name__ == "__main__":
    main()
