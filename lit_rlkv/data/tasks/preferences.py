"""Preferences as a task: prompts with a better and a worse completion, as people or models ranked them."""

import random
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlkv.data.tasks.lines import numbered_lines, parse_object, parse_rows
from lit_rlkv.types import Message, PreferencePair, Problem, Prompt

_ROLES = ("system", "user", "assistant")


class Preferences:
    """A finite task of ranked pairs: the chosen side is to be imitated, the rejected side is its corruption.

    A preference says which of two completions is better; it does not say what is right.
    """

    is_verifiable = False

    def __init__(self, pairs: Sequence[PreferencePair], source: str) -> None:
        if not pairs:
            raise ValueError(f"{source!r} holds no pairs, so there is nothing to prefer; give at least one")
        self.source = source
        """Where the pairs are from, for messages."""
        self._pairs = pairs
        self._rejected: dict[tuple[Prompt, str], list[str]] = {}
        for pair in pairs:
            self._rejected.setdefault((pair.prompt, pair.chosen), []).append(pair.rejected)

    def __repr__(self) -> str:
        return f"Preferences({self.source!r})"

    def __len__(self) -> int:
        return len(self._pairs)

    def at(self, index: int) -> Problem:
        """The prompt of a pair with its chosen side, counted from 0."""
        pair = self._pairs[index]
        return Problem(pair.prompt, solution=pair.chosen, answer=pair.chosen)

    def sample(self, rng: random.Random) -> Problem:
        """Any pair's."""
        return self.at(rng.randrange(len(self)))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is the chosen side, both stripped of surrounding whitespace."""
        return float(completion.strip() == problem.answer.strip())

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The rejected side of this pair; one of them where the chosen side was preferred to several."""
        return rng.choice(self._rejected[problem.prompt, problem.answer])


def read_preferences(path: str | Path) -> Preferences:
    """The pairs of a file of JSON lines, each as `parse_pair` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: lines that are no pairs, by number; all lines are looked at before.
    """
    rows = numbered_lines(Path(path))
    return Preferences(parse_rows(rows, lambda line: parse_pair(parse_object(line))), str(path))


def parse_pair(entry: Mapping[str, Any]) -> PreferencePair:
    """A pair from `prompt`, `chosen` and `rejected`, each a text or chat messages; other keys are ignored.

    These are TRL's formats (https://huggingface.co/docs/trl/dataset_formats): a side is a text, one assistant
    message, or a whole conversation that ends in one. Two conversations differ in that message alone: what
    comes before it is the prompt, and a `prompt` beside them may only repeat it.
    """
    missing = [key for key in ("chosen", "rejected") if entry.get(key) is None]
    if missing:
        raise ValueError(f"missing {' and '.join(missing)}; a preference needs both sides")
    keys = [key for key in ("prompt", "chosen", "rejected") if entry.get(key) is not None]
    given = {key: _text_or_chat(entry[key], key) for key in keys}
    prompt = _checked(_prompt(**given))
    chosen, rejected = (_completion(given[key], key) for key in ("chosen", "rejected"))
    if chosen.strip() == rejected.strip():
        raise ValueError("both sides are equal, so there is nothing to prefer; drop the line or mend it")
    return PreferencePair(prompt, chosen, rejected)


def _text_or_chat(value: Any, key: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f"{key} is {reprlib.repr(value)}, which is neither a text nor chat messages; write text in "
            'quotes, or a list of messages like {"role": "user", "content": "..."}'
        )
    unknown = sorted({message["role"] for message in value} - set(_ROLES))
    if unknown:
        raise ValueError(
            f"{key} has messages of role {', '.join(map(repr, unknown))}; a chat has {', '.join(_ROLES)} only"
        )
    return tuple(Message(message["role"], message["content"]) for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _prompt(chosen: Prompt, rejected: Prompt, prompt: Prompt | None = None) -> Prompt:
    """The prompt given, or that of two conversations."""
    shared = _context(chosen)
    if shared != _context(rejected):
        raise ValueError(
            "chosen and rejected differ before their last message, but what comes before it is the prompt of "
            "both; cut them where they part"
        )
    if not shared:
        if prompt is None:
            raise ValueError("missing prompt; only whole conversations do without, so add it")
        return prompt
    texts = [message.content.strip() for message in shared]
    if prompt not in (None, shared) and not (isinstance(prompt, str) and prompt.strip() in texts):
        raise ValueError(
            "prompt is not what chosen and rejected have before their last message; leave it out, or cut "
            "both sides down to that message"
        )
    return shared


def _context(side: Prompt) -> tuple[Message, ...]:
    return () if isinstance(side, str) else side[:-1]


def _checked(prompt: Prompt) -> Prompt:
    last = Message("user", prompt) if isinstance(prompt, str) else prompt[-1]
    if last.role != "user":
        raise ValueError(f"the prompt ends in a message of role {last.role!r}; end it in one of the user")
    if not last.content.strip():
        raise ValueError("the prompt is empty; drop the line or mend it")
    return prompt


def _completion(side: Prompt, key: str) -> str:
    last = Message("assistant", side) if isinstance(side, str) else side[-1]
    if last.role != "assistant":
        raise ValueError(f"{key} ends in a message of role {last.role!r}; end it in one of the assistant")
    if not last.content.strip():
        raise ValueError(f"{key} is empty; drop the line or mend it")
    return last.content
