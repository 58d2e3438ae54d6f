"""Preferences as a task: prompts with a better and a worse completion, as people or models ranked them."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rlkv.tasks.chat import answerable, text_or_chat
from lit_rlkv.tasks.listed import ListedTask
from lit_rlkv.tasks.rows import Table, read_lines
from lit_rlkv.types import Message, PreferencePair, Problem, Prompt


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
        """The rejected side of this pair; one of them where the chosen side was preferred to several."""
        return rng.choice(self._rejected[problem.prompt, problem.answer])


def read_preferences(path: str | Path) -> Preferences:
    """The pairs of a file of JSON lines, each as `parse_pair` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: lines that are no pairs, by number; all lines are looked at before.
    """
    return Preferences(read_lines(path, parse_pair))


def parse_pair(entry: Mapping[str, Any]) -> PreferencePair:
    """A pair from `prompt`, `chosen` and `rejected`, each a text or chat messages; other keys are ignored.

    These are TRL's formats (https://huggingface.co/docs/trl/dataset_formats): a side is a text, one assistant
    message, or a whole conversation that ends in one. Two conversations differ in that message alone: what
    comes before it is the prompt, and a `prompt` beside them may only repeat it.

    Raises:
        ValueError: a side is missing, empty or no completion; both are equal; or their prompts differ.
    """
    missing = [key for key in ("chosen", "rejected") if entry.get(key) is None]
    if missing:
        raise ValueError(f"missing {' and '.join(missing)}; a preference needs both sides")
    keys = [key for key in ("prompt", "chosen", "rejected") if entry.get(key) is not None]
    given = {key: text_or_chat(entry[key], key) for key in keys}
    prompt = answerable(_prompt(**given))
    chosen, rejected = (_completion(given[key], key) for key in ("chosen", "rejected"))
    if chosen.strip() == rejected.strip():
        raise ValueError("both sides are equal, so there is nothing to prefer; drop the line or mend it")
    return PreferencePair(prompt, chosen, rejected)


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


def _completion(side: Prompt, key: str) -> str:
    last = Message("assistant", side) if isinstance(side, str) else side[-1]
    if last.role != "assistant":
        raise ValueError(f"{key} ends in a message of role {last.role!r}; end it in one of the assistant")
    if not last.content.strip():
        raise ValueError(f"{key} is empty; drop the line or mend it")
    return last.content
