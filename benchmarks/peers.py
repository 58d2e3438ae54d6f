"""Seconds of a GRPO step on a CPU, beside TRL's GRPOTrainer: full fine-tuning with both.

    python benchmarks/peers.py [--trl-python PYTHON] [--rounds 9] [--record]

The same Qwen3 of random weights (the default run's preset with four layers), tokenizer, prompts, reward,
number of responses and tokens, AdamW, and one thread. Seconds are the process's own on the processor, which
other work on the machine does not lengthen; steps of both alternate, because it slows caches and memory.
The embedding of the end token is such that it is never sampled: all responses have the same length.

TRL runs in a process of its own, with any Python that has `trl` and `datasets`:

    python -m venv trl-env && trl-env/bin/pip install trl datasets
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import record
import torch
from peers_parts.reward import share_of_digits
from text_table import text_table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config import composed
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import EOS_TOKEN, build_task_tokenizer
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.outputs import RunOutputs
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.stages.rl import train_policy
from lit_rlkv.tasks.arithmetic import ChainSum
from lit_rlkv.types import Problem

NAME = "peers"
PHASES = ("generate", "score", "update", "total")
N_LAYERS, N_PROMPTS, GROUP_SIZE, N_TOKENS = 4, 16, 8, 40
LR, BETAS, CLIP, MAX_GRAD_NORM = 1e-5, (0.9, 0.98), 0.2, 1.0
N_WARM = 2
"""First steps, which are not counted."""
CACHES = {
    "all keys": ["cache.policy=dense"],
    "random 16+5": ["cache.policy=random", "cache.budget=16", "cache.interval=5"],
}
FAR = 5.0
"""Coordinate that keeps the end token's logit far below all others."""


class Digits(ChainSum):
    """Chain sums whose reward is `share_of_digits`."""

    def score(self, problem: Problem, completion: str) -> float:
        return share_of_digits(completion)


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


def save_endless(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model of random weights and its tokenizer; it never samples its end token."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = FAR
        embeddings[tokenizer.convert_tokens_to_ids(EOS_TOKEN), 0] = -FAR
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_of(folder: Path, cache: Sequence[str], n_steps: int, overrides: Sequence[str] = ()) -> Run:
    """Return a run of this project on the model in `folder`, whose files are in `folder/ours`."""
    settings = [
        *("stages=[rl]", "experiment=none", "algorithm=grpo", "roles=full", "correction=shadow"),
        *(f"model.path={folder}", "model.preset=null", f"runs_dir={folder / 'runs'}", *cache),
        *(f"rollout.n_prompts={N_PROMPTS}", f"algorithm.group_size={GROUP_SIZE}"),
        *(f"rollout.max_new_tokens={N_TOKENS}", "algorithm.n_minibatches=1"),
        *(f"algorithm.n_iterations={n_steps}", f"optimizer.lr={LR}", "algorithm.lr_schedule=constant"),
        *(f"optimizer.betas=[{BETAS[0]},{BETAS[1]}]", f"algorithm.max_grad_norm={MAX_GRAD_NORM}"),
        *(f"algorithm.loss.clip_low={CLIP}", f"algorithm.loss.clip_high={CLIP}"),
        *("fabric.accelerator=cpu", "fabric.n_threads=1", "diagnostics=none"),
        *(f"callbacks.checkpoint_every={n_steps}", f"callbacks.samples_every={n_steps}"),
    ]
    cfg = composed("config", [*settings, *overrides])
    del cfg.hydra
    run = Run(checked_config(cfg), folder=folder / "ours")
    run.task = Digits()
    return run


class Watch(RLCallback):
    """Times the phases of each iteration; stands after all other callbacks."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._at = {"rollout": 0.0, "update": 0.0}
        self._sampled_at = 0.0
        self._n_tokens = 0

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase in self._at:
            self._at[phase] = time.process_time()

    def on_phase_end(self, phase: str, iteration: int) -> None:
        if phase == "rollout":
            self._sampled_at = time.process_time()

    def on_rollout_end(self, experience: Any) -> None:
        self._n_tokens = int(experience.rollout.response_mask.sum())

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        ended_at = time.process_time()
        seconds = {
            "generate": self._sampled_at - self._at["rollout"],
            "score": self._at["update"] - self._sampled_at,
            "update": ended_at - self._at["update"],
            "total": ended_at - self._at["rollout"],
        }
        self.steps.append(Step(seconds, self._n_tokens))


class Alternate(RLCallback):
    """Runs a step of TRL before each iteration."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase == "rollout":
            self.step()


def train_here(run: Run, *more: RLCallback) -> list[Step]:
    """Train with this project's loop, its callbacks and `more`, and return the steps."""
    run.begin()
    outputs, watch = RunOutputs(run), Watch()
    with outputs.open():
        module = make_policy(run, str(run.cfg.model.path))
        train_policy(run, module, [*outputs.callbacks(), *more, watch])
    return watch.steps


class TrainerProcess:
    """A trainer in a process of its own.

    Args:
        cache: fields of `EvictingGRPOConfig`, for `EvictingGRPOTrainer`; None: TRL's own trainer; a list:
            settings of this project, for its own loop.
    """

    def __init__(
        self,
        python: str,
        folder: Path,
        n_steps: int,
        cache: dict[str, Any] | list[str] | None = None,
        name: str = "trl",
    ) -> None:
        source = PromptSource(Digits(), split="train", seed=derive_seed(0, "prompts", "rl"))
        settings = {
            **{"n_threads": torch.get_num_threads(), "n_prompts": N_PROMPTS, "group_size": GROUP_SIZE},
            **{"max_new_tokens": N_TOKENS, "n_steps": n_steps + 1, "lr": LR, "betas": BETAS, "clip": CLIP},
            **{"max_grad_norm": MAX_GRAD_NORM, "cache": cache or {}},
            "prompts": [problem.prompt for problem in source.take(N_PROMPTS * n_steps)],
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


def medians(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median seconds of each phase, without the first steps."""
    found = defaultdict(list)
    for step in steps[N_WARM:]:
        for phase in PHASES:
            found[phase].append(step.seconds[phase])
    return {phase: statistics.median(seconds) for phase, seconds in found.items()}


def times_as_fast(ours: Sequence[Step], theirs: Sequence[Step]) -> dict[str, Any]:
    """Return the median and the range over steps of their time over ours, without the first steps."""
    ratios = [
        b.seconds["total"] / a.seconds["total"] for a, b in zip(ours[N_WARM:], theirs[N_WARM:], strict=True)
    ]
    return {
        "times_as_fast": round(statistics.median(ratios), 3),
        "times_as_fast_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def compare(cache: str, python: str, n_rounds: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Alternate steps of both under a cache of `CACHES`, and return the row of the record."""
    n_steps = N_WARM + n_rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        run = run_of(folder, CACHES[cache], n_steps, overrides)
        theirs = TrainerProcess(python, folder, n_steps)
        ours = train_here(run, Alternate(theirs.step))
        theirs.close()
    both = {"ours": ours, "trl": theirs.steps}
    expected = N_PROMPTS * GROUP_SIZE * N_TOKENS
    assert all(step.n_tokens == expected for steps in both.values() for step in steps)
    seconds = {who: medians(steps) for who, steps in both.items()}
    return {
        "cache": cache,
        "overrides": list(overrides),
        "trl_version": theirs.version,
        "n_trained": theirs.n_trained,
        "n_rounds": n_rounds,
        "seconds": {who: {k: round(v, 4) for k, v in found.items()} for who, found in seconds.items()},
        **times_as_fast(ours, theirs.steps),
    }


def table(row: dict[str, Any]) -> str:
    """Return the seconds of both, and their ratio."""
    ours, theirs = row["seconds"]["ours"], row["seconds"]["trl"]
    rows = [
        [phase, *(f"{1e3 * s[phase]:.0f}" for s in (ours, theirs)), f"{theirs[phase] / ours[phase]:.2f}"]
        for phase in PHASES
    ]
    return text_table(
        ["ms per step", f"lit_rlkv, {row['cache']}", f"TRL {row['trl_version']}", "ratio"], rows
    )


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--trl-python", default=sys.executable, help="Python with trl; default: this one")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each that are counted")
    parser.add_argument("--only", action="append", choices=CACHES, help="cache of lit_rlkv; default: each")
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    for cache in args.only or CACHES:
        row = compare(cache, args.trl_python, args.rounds, overrides)
        ends = row["times_as_fast_range"]
        print(table(row))
        print(
            f"{row['times_as_fast']} times as fast as TRL ({ends[0]}–{ends[1]} over {args.rounds} rounds)\n"
        )
        record.append(NAME, row)


if __name__ == "__main__":
    main()
