"""Steps of this project on demand, in a process of its own as trl_steps.py is.

    python our_steps.py FOLDER     FOLDER holds the model, its tokenizer and peers.json

Each line on stdin runs one step, and one line of JSON on stdout gives its seconds and the peak of memory.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
import peers


class Answers(peers.Watch):
    """Waits for a line before each iteration, and writes the seconds of the iteration after it."""

    def __init__(self, answers: Any) -> None:
        super().__init__()
        self.answers = answers

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase == "rollout" and not sys.stdin.readline():
            os._exit(0)
        super().on_phase_start(phase, iteration)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        super().on_iteration_end(iteration, n_iterations, metrics)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.say(**vars(self.steps[-1]) | {"peak_mib": peak_kib // 1024})

    def say(self, **fields: Any) -> None:
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()


def main(folder: Path) -> None:
    answers = Answers(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what the trainer prints is no answer
    settings = json.loads((folder / "peers.json").read_text())
    torch.set_num_threads(settings["n_threads"])
    peers.N_PROMPTS, peers.GROUP_SIZE = settings["n_prompts"], settings["group_size"]
    peers.N_TOKENS = settings["max_new_tokens"]
    context = peers.context_of(folder, settings["cache"], settings["n_steps"])
    answers.say(version="", n_trained=0)
    peers.train_here(context, folder / "ours", answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
