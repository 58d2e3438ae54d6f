"""Sample responses of the policy on the console, in samples.jsonl and in the report."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.experience.batch import Experience
from lit_rlkv.files import append_if_possible, complete_lines, write_atomically
from lit_rlkv.reporting.progress import stderr_console
from lit_rlkv.types import prompt_text

FILE_NAME = "samples.jsonl"
MAX_SHOWN_CHARACTERS = 400
"""Longest text on the console; samples.jsonl has the full text."""
N_REPORTED = 24
"""Most samples in the report."""


@dataclass(frozen=True)
class LoggedSample:
    """One response with its score; `iteration` counts from 1."""

    prompt: str
    completion: str
    reward: float
    iteration: int


class Samples(RLCallback):
    """Shows the first response to each of the first `n` prompts, every `every_n_iterations` iterations.

    The choice does not depend on rewards, so samples are typical. `latest` are the latest samples, and
    `samples` those for the report: `N_REPORTED`, from the first iteration and the latest ones. samples.jsonl
    in `run_dir` has all samples, and a resumed run reads them back.
    """

    def __init__(
        self,
        run_dir: Path,
        every_n_iterations: int = 10,
        n: int = 3,
        console: Console | None = None,
    ) -> None:
        self.path = run_dir / FILE_NAME
        self.every_n_iterations = every_n_iterations
        self.n = n
        self.console = console or stderr_console()
        if self.path.is_file():  # drops a line that a crash cut short
            write_atomically(self.path, "".join(f"{line}\n" for line in complete_lines(self.path)))
        self.latest: list[LoggedSample] = []
        self.samples = select_samples(_read_back(self.path), N_REPORTED)

    def on_rollout_end(self, experience: Experience) -> None:
        if experience.iteration % self.every_n_iterations:
            return
        self.latest = draw_samples(experience, self.n)
        lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in self.latest]
        append_if_possible(self.path, "".join(lines))
        # A resumed run draws the samples after its checkpoint again.
        earlier = [sample for sample in self.samples if sample.iteration <= experience.iteration]
        self.samples = select_samples([*earlier, *self.latest], N_REPORTED)
        self.console.print(render(self.latest))


def read_samples(path: Path) -> list[LoggedSample]:
    """Return all samples of a file; samples drawn again after a resume replace the earlier ones."""
    latest = {(sample.iteration, sample.prompt): sample for sample in _read_back(path)}
    return sorted(latest.values(), key=lambda sample: sample.iteration)


def select_samples(samples: list[LoggedSample], n_kept: int) -> list[LoggedSample]:
    """Return at most `n_kept` samples: up to half from the first iteration, and the latest."""
    first = [sample for sample in samples if sample.iteration == samples[0].iteration][: n_kept // 2]
    n_latest = min(n_kept, len(samples)) - len(first)
    return first + samples[len(samples) - n_latest :]


def draw_samples(experience: Experience, n: int) -> list[LoggedSample]:
    """Return the first response to each of the first `n` prompts."""
    rewards = experience.rewards.scores.tolist()
    rows = range(0, len(rewards), experience.group_size)[:n]
    return [
        LoggedSample(
            prompt=prompt_text(experience.problems[row].prompt),
            completion=experience.completions[row],
            reward=rewards[row],
            iteration=experience.iteration + 1,
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


def _read_back(path: Path) -> list[LoggedSample]:
    return [LoggedSample(**json.loads(line)) for line in complete_lines(path)]
