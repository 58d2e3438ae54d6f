"""Every row of a user's data, or the first problems of any other task, held against tokenizer and model."""

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

N_SEEN = 64
"""Problems looked at where there is no end of them."""
_CHUNK = 1024
"""Problems tokenized at once."""

_Row = tuple[Prompt, str, str]
"""A prompt, its solution, and the side that was ranked below it."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of each problem that was looked at, and where it stands."""

    prompts: list[int]
    solutions: list[int]
    """With the end of sequence."""
    rejected: list[int]
    """Sides that rows bring to rank below their solution, also with the end; 1 where they have none."""
    places: list[str]

    def named(self, sizes: Sequence[int], is_bad: Callable[[int], bool]) -> str:
        """Where the longest of the bad ones are, as the end of a message."""
        bad = sorted((size, place) for size, place in zip(sizes, self.places, strict=True) if is_bad(size))
        shown = ", ".join(f"{place} ({size} tokens)" for size, place in bad[: -N_REPORTED - 1 : -1])
        return f"; {len(bad)} of {len(self.places)} problems are too long: {shown}"


def measure(task: Task, tokenizer: PreTrainedTokenizerBase, seed: int, *, holds_out: bool) -> Sizes:
    """Tokens of all rows of a user's data, or of the first problems where there is no end of them.

    Args:
        holds_out: whether problems to evaluate on are wanted, so that there must be some.

    Raises:
        ValueError: texts that the tokenizer or its chat template does not take, by row; an empty split.
    """
    problems, places = _looked_at(task, seed)
    if holds_out:
        PromptSource(task, split="eval", seed=seed).take(1)
    worse = (
        [task.rejected(index) for index in range(len(task))]
        if isinstance(task, UserTask)
        else [""] * len(problems)
    )
    rows = [(problem.prompt, problem.solution, side) for problem, side in zip(problems, worse, strict=True)]
    prompts, solutions, rejected = zip(*_measured(tokenizer, rows, places), strict=True)
    return Sizes([*prompts], [*solutions], [*rejected], places)


def check_answers(task: Task, functions: Mapping[str, RewardFunction], seed: int) -> None:
    """Refuse problems that a reward function could not score any completion of.

    Raises:
        ValueError: which rows they are, and why.
    """
    problems, places = _looked_at(task, seed)
    for function in functions.values():
        parse_rows(zip(places, problems, strict=True), function.check)


def check_prompts_fit(model: PreTrainedModel, sizes: Sizes, max_new_tokens: int) -> None:
    """Refuse prompts that leave the model no room for a response.

    Raises:
        ValueError: what `check_length` has against them, and which rows they are.
    """
    _check_fit(model, sizes, sizes.prompts, max_new_tokens)


def check_completions_fit(model: PreTrainedModel, sizes: Sizes, *, has_pairs: bool) -> None:
    """Refuse prompts that the model cannot read together with their solution or, for pairs, rejected side.

    Raises:
        ValueError: what `check_length` has against them, and which rows they are.
    """
    sides = [sizes.solutions, *([sizes.rejected] if has_pairs else [])]
    longest = (max(counts) for counts in zip(*sides, strict=True))
    _check_fit(model, sizes, [sum(counts) for counts in zip(sizes.prompts, longest, strict=True)])


def _check_fit(model: PreTrainedModel, sizes: Sizes, counts: Sequence[int], n_more: int = 0) -> None:
    """Refuse rows with so many tokens, and as many more."""

    def is_too_long(n_tokens: int) -> bool:
        try:
            check_length(model, n_tokens + n_more)
        except ValueError:
            return True
        return False

    try:
        check_length(model, max(counts) + n_more)
    except ValueError as error:
        raise ValueError(f"{error}{sizes.named(counts, is_too_long)}") from error


def _looked_at(task: Task, seed: int) -> tuple[list[Problem], list[str]]:
    """Problems, and where each stands: all rows of a user's data, of other tasks the first to train on."""
    first = PromptSource(task, split="train", seed=seed).take(N_SEEN)
    if isinstance(task, UserTask):
        indices = range(len(task))
        return [task.at(index) for index in indices], [task.place(index) for index in indices]
    return first, [f"{task} {prompt_text(problem.prompt)!r}" for problem in first]


def _measured(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Row], places: Sequence[str]
) -> list[tuple[int, ...]]:
    """Tokens of each text: many at once, and one by one where any of them is not right."""
    if not is_task_tokenizer(tokenizer):  # which has a check of its own for each character
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        with suppress(ValueError):
            return [sizes for chunk in chunks for sizes in _many(tokenizer, chunk)]
    return parse_rows(zip(places, rows, strict=True), lambda row: _one(tokenizer, *row))


def _one(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *completions: str) -> tuple[int, ...]:
    n_prompt = len(encode_prompt(tokenizer, prompt))
    return n_prompt, *(len(encode(tokenizer, completion)) + 1 for completion in completions)


def _many(tokenizer: PreTrainedTokenizerBase, rows: Sequence[_Row]) -> list[tuple[int, ...]]:
    """As `_one`, for all of them in three calls."""
    texts = [format_prompt(tokenizer, prompt) for prompt, *_ in rows]
    prompts = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    columns = [[row[place] for row in rows] for place in (1, 2)]
    sides = [tokenizer(column, add_special_tokens=False)["input_ids"] for column in columns]
    for row, *encoded in zip(rows, prompts, *sides, strict=True):
        if not encoded[0]:
            raise ValueError("a prompt without tokens")
        if any(tokenizer.unk_token_id in input_ids for input_ids in encoded):
            _one(tokenizer, *row)
    return [
        (len(prompt), *(len(input_ids) + 1 for input_ids in completions))
        for prompt, *completions in zip(prompts, *sides, strict=True)
    ]
