"""Sample responses of the policy on the console and in samples.jsonl."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.experience.batch import Experience
from lit_rlkv.files import append_if_possible, read_if_there, write_atomically
from lit_rlkv.reporting.logged_samples import LoggedSample, read_samples
from lit_rlkv.reporting.progress import stderr_console
from lit_rlkv.rewards.verifier import EXACT_MATCH
from lit_rlkv.run_files import SAMPLES
from lit_rlkv.types import prompt_text

MAX_SHOWN_CHARACTERS = 400
"""Longest text on the console; samples.jsonl has the full text."""
RIGHT = 1.0
"""Lowest accuracy that counts as correct."""


class Samples(RLCallback):
    """Shows the first response to each of the first `n` prompts, every `every_n_iterations` iterations.

    The choice does not depend on rewards, so samples are typical. `latest` are the latest samples;
    samples.jsonl in `run_dir` has all of them; a resumed run keeps those up to its checkpoint.

    Args:
        accuracy: component of the reward that says if a response is correct; the task's verifier, or what
            `reward.accuracy` names.
        resumed_at: iterations in the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        run_dir: Path,
        every_n_iterations: int = 10,
        n: int = 3,
        console: Console | None = None,
        accuracy: str | None = EXACT_MATCH,
        resumed_at: int = 0,
    ) -> None:
        self.path = run_dir / SAMPLES
        self.every_n_iterations = every_n_iterations
        self.n = n
        self.accuracy = accuracy
        self.console = console or stderr_console()
        earlier = read_if_there(self.path, read_samples, [])
        if self.path.exists():  # drops a line that a crash cut short, and iterations that are sampled again
            write_atomically(self.path, _lines([one for one in earlier if one.iteration <= resumed_at]))
        self.latest: list[LoggedSample] = []

    def on_rollout_end(self, experience: Experience) -> None:
        if experience.iteration % self.every_n_iterations:
            return
        self.latest = draw_samples(experience, self.n, self.accuracy)
        append_if_possible(self.path, _lines(self.latest))
        self.console.print(render(self.latest))


def _lines(samples: Sequence[LoggedSample]) -> str:
    return "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)


def draw_samples(experience: Experience, n: int, accuracy: str | None = EXACT_MATCH) -> list[LoggedSample]:
    """Return the first response to each of the first `n` prompts."""
    rewards = experience.rewards.scores.tolist()
    scores = None if accuracy is None else experience.rewards.components.get(accuracy)
    texts = experience.transcripts or experience.completions
    known = [math.nan] * len(rewards) if scores is None else scores.tolist()
    rows = range(0, len(rewards), experience.group_size)[:n]
    return [
        LoggedSample(
            prompt=prompt_text(experience.problems[row].prompt),
            completion=texts[row],
            reward=rewards[row],
            iteration=experience.iteration + 1,
            answer=experience.problems[row].answer,
            is_right=None if math.isnan(known[row]) else known[row] >= RIGHT,
        )
        for row in rows
    ]


def render(samples: list[LoggedSample]) -> Group:
    """Return the console view of samples; markup and control characters are escaped."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Reward", justify="right")
    table.add_column("Prompt", overflow="fold")
    table.add_column("Completion", overflow="fold")
    for sample in samples:
        prompt, completion = _printable(sample.prompt), _printable(sample.completion)
        table.add_row(f"{sample.reward:.2f}", Text(prompt, style="dim"), Text(completion))
    return Group(Rule(f"samples of iteration {samples[0].iteration}", align="left", style="dim"), table)


def _printable(text: str) -> str:
    """Return the text shortened, with control characters escaped so that they cannot change the terminal."""
    cut = text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in cut)
