"""Steps of this project on demand, in a process of its own as trl_steps.py is.

    python our_steps.py FOLDER     FOLDER holds the model, its tokenizer and peers.json

Each line on stdin runs one step, and one line of JSON on stdout gives its seconds and the peak of memory.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from peers_parts.reward import share_of_digits

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config import composed
from lit_rlkv.runs.outputs import RunOutputs
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.stages.rl import train_policy
from lit_rlkv.tasks.arithmetic import ChainSum
from lit_rlkv.types import Problem


class Digits(ChainSum):
    """Chain sums whose reward is `share_of_digits`."""

    def score(self, problem: Problem, completion: str) -> float:
        return share_of_digits(completion)


def run_of(folder: Path, asked: Mapping[str, Any]) -> Run:
    """Return a run of this project on the model in `folder`, as peers.json asks for it; its own is `ours`."""
    n_steps, (beta1, beta2), clip = asked["n_steps"], asked["betas"], asked["clip"]
    settings = [
        *("stages=[rl]", "experiment=none", "algorithm=grpo", "roles=full", "correction=shadow"),
        *(f"model.path={folder}", "model.preset=null", f"runs_dir={folder / 'runs'}"),
        *(f"rollout.n_prompts={asked['n_prompts']}", f"algorithm.group_size={asked['group_size']}"),
        *(f"rollout.max_new_tokens={asked['max_new_tokens']}", "algorithm.n_minibatches=1"),
        *(f"algorithm.n_iterations={n_steps}", f"optimizer.lr={asked['lr']}"),
        *("algorithm.lr_schedule=constant", f"optimizer.betas=[{beta1},{beta2}]"),
        f"algorithm.max_grad_norm={asked['max_grad_norm']}",
        *(f"algorithm.loss.clip_low={clip}", f"algorithm.loss.clip_high={clip}"),
        *("fabric.accelerator=cpu", f"fabric.n_threads={asked['n_threads']}", "diagnostics=none"),
        *(f"callbacks.checkpoint_every={n_steps}", f"callbacks.samples_every={n_steps}"),
    ]
    cfg = composed("config", [*settings, *asked["cache"]])
    del cfg.hydra
    run = Run(checked_config(cfg), folder=folder / "ours")
    run.task = Digits()
    return run


class Answers(RLCallback):
    """Waits for a line before each iteration, and writes its seconds after it; stands after all others."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.started_at = self.sampled_at = self.scored_at = 0.0
        self.n_tokens = 0

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase == "rollout":
            if not sys.stdin.readline():
                os._exit(0)
            self.started_at = time.process_time()
        elif phase == "update":
            self.scored_at = time.process_time()

    def on_phase_end(self, phase: str, iteration: int) -> None:
        if phase == "rollout":
            self.sampled_at = time.process_time()

    def on_rollout_end(self, experience: Any) -> None:
        self.n_tokens = int(experience.rollout.response_mask.sum())

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        ended_at = time.process_time()
        seconds = {
            "generate": self.sampled_at - self.started_at,
            "score": self.scored_at - self.sampled_at,
            "update": ended_at - self.scored_at,
            "total": ended_at - self.started_at,
        }
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.say(seconds=seconds, n_tokens=self.n_tokens, peak_mib=peak_kib // 1024)

    def say(self, **fields: Any) -> None:
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()


def train_here(run: Run, *more: RLCallback) -> None:
    """Train with this project's loop, its callbacks and `more`."""
    run.begin()
    outputs = RunOutputs(run)
    with outputs.open():
        module = make_policy(run, str(run.cfg.model.path))
        train_policy(run, module, [*outputs.callbacks(), *more])


def main(folder: Path) -> None:
    answers = Answers(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what the trainer prints is no answer
    asked = json.loads((folder / "peers.json").read_text())
    torch.set_num_threads(asked["n_threads"])
    run = run_of(folder, asked)
    answers.say(version="", n_trained=0)
    train_here(run, answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
