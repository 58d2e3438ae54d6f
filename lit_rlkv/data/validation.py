"""Checks of a user's rows, or of the first problems of any other task, with tokenizer and model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import encode, encode_prompt, format_prompt, is_task_tokenizer
from lit_rlkv.models.backbone import check_length
from lit_rlkv.rewards import RewardFunction
from lit_rlkv.tasks import Task, UserTask
from lit_rlkv.tasks.rows import N_REPORTED, parse_rows
from lit_rlkv.types import Problem, Prompt, prompt_text

N_CHECKED = 64
"""Problems checked of an endless task."""
_CHUNK = 1024
"""Problems tokenized at once."""

_Row = tuple[Prompt, str, str]
"""A prompt, its solution and its rejected side."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens of the checked problems."""

    prompts: list[int]
    solutions: list[int]
    """Solutions, with the end of sequence."""
    rejected: list[int]
    """Rejected sides, with the end of sequence; 1 for rows without one."""
    places: list[str]
    """File and line of each problem, or its prompt."""

    def longest(self, sizes: Sequence[int], is_bad: Callable[[int], bool]) -> str:
        """Return the places of the longest bad problems as the end of a message."""
        bad = sorted((size, place) for size, place in zip(sizes, self.places, strict=True) if is_bad(size))
        shown = ", ".join(f"{place} ({size} tokens)" for size, place in bad[: -N_REPORTED - 1 : -1])
        return f"; {len(bad)} of {len(self.places)} problems are too long: {shown}"


def measure(task: Task, tokenizer: PreTrainedTokenizerBase, seed: int, *, needs_eval_split: bool) -> Sizes:
    """Count the tokens of all rows of a user's data, or of the first problems of another task."""
    problems, places = _problems_and_places(task, seed)
    if needs_eval_split:
        PromptSource(task, split="eval", seed=seed).take(1)
    sides = map(task.rejected, range(len(task))) if isinstance(task, UserTask) else [""] * len(problems)
    rows = [(problem.prompt, problem.solution, side) for problem, side in zip(problems, sides, strict=True)]
    prompts, solutions, rejected = zip(*_token_counts(tokenizer, rows, places), strict=True)
    return Sizes([*prompts], [*solutions], [*rejected], places)


def check_answers(task: Task, functions: Mapping[str, RewardFunction], seed: int) -> None:
    """Raise a ValueError that names problems for which a reward function cannot score completions."""
    problems, places = _problems_and_places(task, seed)
    for function in functions.values():
        parse_rows(zip(places, problems, strict=True), function.check)


def check_prompts_fit(model: PreTrainedModel, sizes: Sizes, max_new_tokens: int) -> None:
    """Raise a ValueError that names prompts after which the model has no room for a response."""
    _check_fit(model, sizes, sizes.prompts, max_new_tokens)


def check_completions_fit(model: PreTrainedModel, sizes: Sizes, *, has_pairs: bool) -> None:
    """Raise a ValueError that names prompts too long with their solution or, for pairs, rejected side."""
    sides = [sizes.solutions, *([sizes.rejected] if has_pairs else [])]
    longest = (max(counts) for counts in zip(*sides, strict=True))
    _check_fit(model, sizes, [sum(counts) for counts in zip(sizes.prompts, longest, strict=True)])


def _check_fit(model: PreTrainedModel, sizes: Sizes, counts: Sequence[int], n_more: int = 0) -> None:
    def is_too_long(n_tokens: int) -> bool:
        try:
            check_length(model, n_tokens + n_more)
        except ValueError:
            return True
        return False

    try:
        check_length(model, max(counts) + n_more)
    except ValueError as error:
        raise ValueError(f"{error}{sizes.longest(counts, is_too_long)}") from error


def _problems_and_places(task: Task, seed: int) -> tuple[list[Problem], list[str]]:
    """Return all problems of a user's data, or the first of another task, with their places."""
    first = PromptSource(task, split="train", seed=seed).take(N_CHECKED)
    if isinstance(task, UserTask):
        indices = range(len(task))
        return [task.at(index) for index in indices], [task.place(index) for index in indices]
    return first, [f"{task} {prompt_text(problem.prompt)!r}" for problem in first]


def _token_counts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Row], places: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the tokens of each text: from batches, or one by one to name the rows that cannot be used."""
    if not is_task_tokenizer(tokenizer):  # which has a check of its own for each character
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        with suppress(ValueError):
            return [sizes for chunk in chunks for sizes in _count_batch(tokenizer, chunk)]
    return parse_rows(zip(places, rows, strict=True), lambda row: _count_row(tokenizer, *row))


def _count_row(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *completions: str) -> tuple[int, ...]:
    n_prompt = len(encode_prompt(tokenizer, prompt))
    return n_prompt, *(len(encode(tokenizer, completion)) + 1 for completion in completions)


def _count_batch(tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Row]) -> list[tuple[int, ...]]:
    """Return the counts of `_count_row` for all rows, in three calls of the tokenizer."""
    texts = [format_prompt(tokenizer, prompt) for prompt, *_ in rows]
    prompts = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    columns = [[row[place] for row in rows] for place in (1, 2)]
    sides = [tokenizer(column, add_special_tokens=False)["input_ids"] for column in columns]
    for row, *encoded in zip(rows, prompts, *sides, strict=True):
        if not encoded[0]:
            raise ValueError("a prompt without tokens")
        if any(tokenizer.unk_token_id in input_ids for input_ids in encoded):
            _count_row(tokenizer, *row)
    return [
        (len(prompt), *(len(input_ids) + 1 for input_ids in completions))
        for prompt, *completions in zip(prompts, *sides, strict=True)
    ]
