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
"""Longest text on the console; the file has all of it."""
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
    """Every `every_n_iterations`, from the first on, the first response to each of the first `n` prompts.

    Which texts these are does not depend on their reward, so they show what is usual. `latest` is the latest
    draw, and `samples` what the report shows of all: `N_REPORTED` of the first and the latest. samples.jsonl
    in `run_dir` has every one, and a resumed run reads them back.
    """

    def __init__(
        self,
        run_dir: Path,
        every_n_iterations: int = 10,
        n: int = 3,
        console: Console | None = None,
    ) -> None:
        for name, value in {"every_n_iterations": every_n_iterations, "n": n}.items():
            if value < 1:
                raise ValueError(f"samples.{name}={value} must be at least 1")
        if not run_dir.is_dir():
            raise ValueError(f"run_dir={str(run_dir)!r} must be an existing directory; create it first")
        self.path = run_dir / FILE_NAME
        self.every_n_iterations = every_n_iterations
        self.n = n
        self.console = console or stderr_console()
        if self.path.is_file():  # what a crash cut short would spoil the line that comes next
            write_atomically(self.path, "".join(f"{line}\n" for line in complete_lines(self.path)))
        self.latest: list[LoggedSample] = []
        self.samples = thinned(_read_back(self.path), N_REPORTED)

    def on_rollout_end(self, experience: Experience) -> None:
        if experience.iteration % self.every_n_iterations:
            return
        self.latest = draw(experience, self.n)
        lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in self.latest]
        append_if_possible(self.path, "".join(lines))
        # What a run recorded after the checkpoint that it resumed from is drawn again.
        earlier = [sample for sample in self.samples if sample.iteration <= experience.iteration]
        self.samples = thinned([*earlier, *self.latest], N_REPORTED)
        self.console.print(render(self.latest))


def recorded(path: Path) -> list[LoggedSample]:
    """All samples of a file; what was drawn again after a resume takes the place of what it was before."""
    latest = {(sample.iteration, sample.prompt): sample for sample in _read_back(path)}
    return sorted(latest.values(), key=lambda sample: sample.iteration)


def thinned(samples: list[LoggedSample], n_kept: int) -> list[LoggedSample]:
    """Keep at most `n_kept` samples: the first iteration's, up to half of all, and the latest."""
    first = [sample for sample in samples if sample.iteration == samples[0].iteration][: n_kept // 2]
    n_latest = min(n_kept, len(samples)) - len(first)
    return first + samples[len(samples) - n_latest :]


def draw(experience: Experience, n: int) -> list[LoggedSample]:
    """The first response to each of the first `n` prompts, or to all where there are fewer."""
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
    """Return the console view of samples; their text is escaped, never markup or terminal codes."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Reward", justify="right")
    table.add_column("Prompt", overflow="fold")
    table.add_column("Completion", overflow="fold")
    for sample in samples:
        prompt, completion = _shown(sample.prompt), _shown(sample.completion)
        table.add_row(f"{sample.reward:.2f}", Text(prompt, style="dim"), Text(completion))
    return Group(Rule(f"samples of iteration {samples[0].iteration}", align="left", style="dim"), table)


def _shown(text: str) -> str:
    """The text cut to what fits, control characters as their escapes: they could redraw the terminal."""
    cut = text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in cut)


def _read_back(path: Path) -> list[LoggedSample]:
    return [LoggedSample(**json.loads(line)) for line in complete_lines(path)]
