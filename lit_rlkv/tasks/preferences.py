"""Preferences as a task: prompts with a better and a worse completion, as people or models ranked them."""

import random
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lit_rlkv.tasks.base import ListedTask
from lit_rlkv.tasks.rows import (
    Table,
    UnusableRowError,
    parse_prompt,
    read_lines,
    read_rows,
    require_user_turn,
)
from lit_rlkv.types import Message, PreferencePair, Problem, Prompt

_TURN = re.compile(r"\n\n(Human|Assistant):")
"""Before each message of a conversation in Anthropic/hh-rlhf."""


class Preferences(ListedTask[PreferencePair]):
    """Ranked pairs: the chosen side is to be imitated, the rejected side is its corruption.

    A preference says which of two completions is better; it does not say what is right.
    """

    is_verifiable = False

    def __init__(self, table: Table[PreferencePair], held_out: Table[PreferencePair] | None = None) -> None:
        super().__init__(table, held_out)
        self._rejected: dict[tuple[Prompt, str], list[str]] = {}
        for pair in self._table.rows:
            self._rejected.setdefault((pair.prompt, pair.chosen), []).append(pair.rejected)

    def at(self, index: int) -> Problem:
        pair = self._table.rows[index]
        return Problem(pair.prompt, solution=pair.chosen, answer=pair.chosen)

    def rejected(self, index: int) -> str:
        return self._table.rows[index].rejected

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is the chosen side, both stripped of surrounding whitespace."""
        return float(completion.strip() == problem.answer.strip())

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return the rejected side of the pair, or one of them if the chosen side is in several pairs."""
        return rng.choice(self._rejected[problem.prompt, problem.answer])


def read_preferences(path: str | Path) -> Preferences:
    """Read the pairs of a file of JSON lines, each as in `parse_pair`."""
    return Preferences(read_lines(path, parse_pair))


def load_preferences(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    eval_split: str | None = None,
    prompt_column: str | None = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
) -> Preferences:
    """Load the pairs of a dataset, each row as in `parse_pair`.

    Args:
        dataset, name, split: as in `lit_rlkv.tasks.rows.read_rows`.
        eval_split: the pairs to evaluate on; None holds out about one in ten. Training leaves out pairs with
            one of their prompts.
        prompt_column: None if both sides are whole conversations, which contain their prompt.
    """
    wanted = {"prompt": prompt_column, "chosen": chosen_column, "rejected": rejected_column}
    columns = tuple((key, column) for key, column in wanted.items() if column is not None)
    hint = (
        f"set {', '.join(f'{key}_column' for key in wanted)}, with prompt_column=null if the sides are whole "
        "conversations"
    )
    read = partial(read_rows, dataset, parse_pair, columns, hint=hint, name=name)
    return Preferences(read(split=split), None if eval_split is None else read(split=eval_split))


def parse_pair(entry: Mapping[str, Any]) -> PreferencePair:
    """Return a pair from `prompt`, `chosen` and `rejected`, each a text or chat messages.

    These are TRL's formats (https://huggingface.co/docs/trl/dataset_formats): a side is a text, one assistant
    message, or a whole conversation that ends in one. Two conversations differ in that message alone: the
    messages before it are the prompt, and a `prompt` beside them may only repeat it. Without a `prompt` a
    text in the form of Anthropic/hh-rlhf is a conversation, too. Other keys are ignored.

    Raises:
        UnusableRowError: two conversations that are texts are no pair.
        ValueError: any other entry is no pair.
    """
    missing = [key for key in ("chosen", "rejected") if entry.get(key) is None]
    if missing:
        raise ValueError(f"missing {' and '.join(missing)}; a preference needs both sides")
    keys = [key for key in ("prompt", "chosen", "rejected") if entry.get(key) is not None]
    given = {key: parse_prompt(entry[key], key) for key in keys}
    if "prompt" in given:
        return _pair(given)
    chats = {key: _conversation(side) for key, side in given.items()}
    if chats == given:
        return _pair(given)
    try:
        return _pair(chats)
    except ValueError as error:  # a few of hh-rlhf are empty, or differ before their last message
        raise UnusableRowError(str(error)) from error


def _pair(given: Mapping[str, Prompt]) -> PreferencePair:
    prompt = require_user_turn(_prompt(**given))
    chosen, rejected = (_completion(given[key], key) for key in ("chosen", "rejected"))
    if chosen.strip() == rejected.strip():
        raise ValueError("both sides are equal, but a preference needs two; drop the line or fix it")
    return PreferencePair(prompt, chosen, rejected)


def _conversation(side: Prompt) -> Prompt:
    """Return the messages of a text in the form of hh-rlhf, and anything else as it is."""
    if not isinstance(side, str):
        return side
    before, *parts = _TURN.split("\n\n" + side.replace("\r\n", "\n").lstrip())
    if before or not parts:
        return side
    roles = ("user" if name == "Human" else "assistant" for name in parts[::2])
    return tuple(Message(role, text.strip()) for role, text in zip(roles, parts[1::2], strict=True))


def _prompt(chosen: Prompt, rejected: Prompt, prompt: Prompt | None = None) -> Prompt:
    """Return the prompt given, or that of two conversations."""
    shared, other = (() if isinstance(side, str) else side[:-1] for side in (chosen, rejected))
    if shared != other:
        raise ValueError(
            "chosen and rejected must be equal before their last message, which is the prompt of both; cut "
            "them where they begin to differ"
        )
    if not shared:
        if prompt is None:
            raise ValueError("missing prompt; only whole conversations contain theirs, so add it")
        return prompt
    texts = [message.content.strip() for message in shared]
    if prompt not in (None, shared) and not (isinstance(prompt, str) and prompt.strip() in texts):
        raise ValueError(
            "prompt must repeat the messages of chosen and rejected before their last; leave it out, or cut "
            "both sides down to the last message"
        )
    return shared


def _completion(side: Prompt, key: str) -> str:
    last = Message("assistant", side) if isinstance(side, str) else side[-1]
    if last.role != "assistant":
        raise ValueError(f"{key} must end in a message of the assistant, got role {last.role!r}")
    if not last.content.strip():
        raise ValueError(f"{key} is empty; drop the line or fix it")
    return last.content
