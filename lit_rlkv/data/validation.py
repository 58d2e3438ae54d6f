"""Checks of a user's rows, or of the first problems of any other task, with tokenizer and model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.chat import Observe, encode_prompt, encode_response
from lit_rlkv.data.chat_template import Tool
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.models.backbone import check_length
from lit_rlkv.rewards import ExactMatch, MathVerify, Numeric, RewardFunction, RewardManager
from lit_rlkv.tasks import Task, UserTask
from lit_rlkv.tasks.rows import N_REPORTED, parse_rows
from lit_rlkv.types import Problem, prompt_text

N_CHECKED = 64
"""Problems checked of an endless task."""
_CHUNK = 1024
"""Solutions scored at once."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens of the checked problems."""

    prompts: list[int]
    solutions: list[int]
    """Solutions and the turns before them, with their ends and what the chat template writes between them."""
    rejected: list[int]
    """Rejected sides, with their end; that alone for rows without one."""
    places: list[str]
    """File and line of each problem, or its prompt."""

    def longest(self, sizes: Sequence[int], is_bad: Callable[[int], bool]) -> str:
        """Return the places of the longest bad problems as the end of a message."""
        bad = sorted((size, place) for size, place in zip(sizes, self.places, strict=True) if is_bad(size))
        shown = ", ".join(f"{place} ({size} tokens)" for size, place in bad[: -N_REPORTED - 1 : -1])
        return f"; {len(bad)} of {len(self.places)} problems are too long: {shown}"


def measure(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    needs_eval_split: bool,
    tools: Sequence[Tool] = (),
    observe: Observe = None,
    on_progress: Callable[[int], object] = int,
) -> Sizes:
    """Count the tokens of all rows of a user's data, or of the first problems of another task.

    Args:
        tools: functions that the chat template describes in each prompt.
        observe: returns the observation after a worked turn.
        on_progress: called with the number of further rows.
    """
    if needs_eval_split:
        PromptSource(task, split="eval", seed=seed).take(1)
    sides = map(task.rejected, range(len(task))) if isinstance(task, UserTask) else repeat("")
    rows = ((row[0], (*row, side)) for row, side in zip(_problems(task, seed), sides, strict=False))

    def count(row: tuple[str, Problem, str]) -> tuple[int, int, int, str]:
        on_progress(1)
        place, problem, side = row
        n_solution = len(encode_response(tokenizer, problem.solution, problem.turns, observe)[0])
        n_rejected = len(encode_response(tokenizer, side, (), observe)[0])
        return len(encode_prompt(tokenizer, problem.prompt, tools)), n_solution, n_rejected, place

    prompts, solutions, rejected, places = zip(*parse_rows(rows, count), strict=True)
    return Sizes([*prompts], [*solutions], [*rejected], [*places])


def check_answers(task: Task, functions: Mapping[str, RewardFunction], seed: int) -> None:
    """Raise a ValueError that names problems for which a reward function cannot score completions."""
    for function in functions.values():
        parse_rows(_problems(task, seed), function.check)


def solutions_below_full_score(
    task: Task,
    rewards: RewardManager,
    names: Sequence[str],
    seed: int,
    *,
    on_progress: Callable[[int], object] = int,
) -> dict[str, list[str]]:
    """Return the places of problems whose solution scores below 1, by function that compares answers.

    Problems without a solution are left out, and so are those that show their answer alone where the prompt
    says behind which marker the function looks for it.

    Args:
        names: functions of `rewards` that the run asks.
        on_progress: called with the number of further rows.
    """
    compared = (ExactMatch, MathVerify, Numeric)
    low: dict[str, list[str]] = {name: [] for name in names if isinstance(rewards.functions[name], compared)}
    markers = {name: getattr(rewards.functions[name], "answer_after", None) for name in low}
    rows = _problems(task, seed) if low else iter(())
    while chunk := [*islice(rows, _CHUNK)]:
        own = [(place, row) for place, row in chunk if row.solution.strip()]
        problems = [row for _, row in own]
        found = rewards.ask(problems, [row.solution for row in problems], [*low]).collect(warns=False)
        for name, places in low.items():
            for (place, row), score in zip(own, found.scores[name].tolist(), strict=True):
                shown = prompt_text(row.prompt) if row.solution == row.answer else ""
                places += [] if score >= 1 or (markers[name] or "\0") in shown else [place]
        on_progress(len(chunk))
    return {name: places for name, places in low.items() if places}


def check_prompts_fit(model: PreTrainedModel, sizes: Sizes, max_new_tokens: int) -> None:
    """Raise a ValueError that names prompts after which the model has no room for a response."""
    advice = "lower rollout.max_new_tokens or shorten the prompts"
    _check_fit(model, sizes, sizes.prompts, advice, max_new_tokens)


def check_completions_fit(model: PreTrainedModel, sizes: Sizes, *, has_pairs: bool) -> None:
    """Raise a ValueError that names prompts too long with their solution or, for pairs, rejected side."""
    sides = [sizes.solutions, *([sizes.rejected] if has_pairs else [])]
    longest = (max(counts) for counts in zip(*sides, strict=True))
    counts = [sum(both) for both in zip(sizes.prompts, longest, strict=True)]
    _check_fit(model, sizes, counts, "shorten the texts")


def _check_fit(
    model: PreTrainedModel, sizes: Sizes, counts: Sequence[int], advice: str, n_more: int = 0
) -> None:
    def is_too_long(n_tokens: int) -> bool:
        try:
            check_length(model, n_tokens + n_more)
        except ValueError:
            return True
        return False

    try:
        check_length(model, max(counts) + n_more, advice)
    except ValueError as error:
        raise ValueError(f"{error}{sizes.longest(counts, is_too_long)}") from error


def _problems(task: Task, seed: int) -> Iterator[tuple[str, Problem]]:
    """Yield all problems of a user's data, or the first of another task, behind their places."""
    if isinstance(task, UserTask):
        yield from ((task.place(index), task.at(index)) for index in range(len(task)))
        return
    for problem in PromptSource(task, split="train", seed=seed).take(N_CHECKED):
        yield f"{task} {prompt_text(problem.prompt)!r}", problem
