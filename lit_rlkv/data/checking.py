"""Every row of a user's data, or the first problems of any other task, held against tokenizer and model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tasks import Task, UserTask
from lit_rlkv.data.tasks.lines import N_REPORTED, parse_rows
from lit_rlkv.data.tokenizers import check_encodable, encode, encode_prompt, format_prompt, is_task_tokenizer
from lit_rlkv.models.backbone import check_length
from lit_rlkv.rewards import RewardFunction
from lit_rlkv.types import Problem, prompt_text

N_SEEN = 64
"""Problems looked at where there is no end of them."""
_CHUNK = 1024
"""Problems tokenized at once."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of each problem that was looked at, and where it stands."""

    prompts: list[int]
    solutions: list[int]
    """With the end of sequence."""
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
    sizes = _measured(tokenizer, problems, places)
    return Sizes([prompt for prompt, _ in sizes], [solution for _, solution in sizes], places)


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

    def is_too_long(n_tokens: int) -> bool:
        try:
            check_length(model, n_tokens + max_new_tokens)
        except ValueError:
            return True
        return False

    try:
        check_length(model, max(sizes.prompts) + max_new_tokens)
    except ValueError as error:
        raise ValueError(f"{error}{sizes.named(sizes.prompts, is_too_long)}") from error


def _looked_at(task: Task, seed: int) -> tuple[list[Problem], list[str]]:
    """Problems, and where each stands: all rows of a user's data, of other tasks the first to train on."""
    first = PromptSource(task, split="train", seed=seed).take(N_SEEN)
    if isinstance(task, UserTask):
        indices = range(len(task))
        return [task.at(index) for index in indices], [task.place(index) for index in indices]
    return first, [f"{task} {prompt_text(problem.prompt)!r}" for problem in first]


def _measured(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], places: Sequence[str]
) -> list[tuple[int, int]]:
    """Tokens of prompt and solution: many texts at once, and one by one where any of them is not right."""
    if not is_task_tokenizer(tokenizer):  # which has a check of its own for each character
        chunks = [problems[start : start + _CHUNK] for start in range(0, len(problems), _CHUNK)]
        with suppress(ValueError):
            return [sizes for chunk in chunks for sizes in _many(tokenizer, chunk)]
    return parse_rows(zip(places, problems, strict=True), lambda problem: _one(tokenizer, problem))


def _one(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> tuple[int, int]:
    n_prompt = len(encode_prompt(tokenizer, problem.prompt))
    return n_prompt, len(encode(tokenizer, problem.solution)) + 1


def _many(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[tuple[int, int]]:
    """As `_one`, for all of them in two calls."""
    texts = [format_prompt(tokenizer, problem.prompt) for problem in problems]
    prompts = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    solutions = tokenizer([problem.solution for problem in problems], add_special_tokens=False)["input_ids"]
    for problem, prompt, solution in zip(problems, prompts, solutions, strict=True):
        if not prompt:
            raise ValueError("a prompt without tokens")
        if tokenizer.unk_token_id in prompt or tokenizer.unk_token_id in solution:
            check_encodable(tokenizer, problem.solution)
            encode_prompt(tokenizer, problem.prompt)
    return [(len(prompt), len(ids) + 1) for prompt, ids in zip(prompts, solutions, strict=True)]
