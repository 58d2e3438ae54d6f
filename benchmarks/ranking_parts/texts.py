"""Texts of the ranking: notes in a prompt, and a response that repeats them after the model's own words.

A response has, in this order: the answer to a question of the prompt; two statements of its own; words that
the model sampled with all keys; and what the prompt and the response said before, once more.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from pretrained_parts.prompts import CHATS, FACTS, FILLERS, SEED
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv import CacheSpec, generate
from lit_rlkv.rng import stream
from lit_rlkv.types import PromptBatch

N_NOTES, N_LATER, N_OWN = 3, 2, 2
"""Facts in a prompt; those of them that are repeated at the end; facts that the response states."""
N_SENTENCES = 10
RECALLS = ("asked", "later", "own")
"""A fact that the prompt asks for; one of the prompt that nothing asks for; one that the response stated."""
TEXT = "text"
OTHER = "other"
SEGMENTS = (OTHER, TEXT, *RECALLS)


@dataclass(frozen=True)
class Example:
    """A message of the user, and the facts that the response tells, as name and value."""

    message: str
    asked: tuple[str, str]
    later: tuple[tuple[str, str], ...]
    own: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Texts:
    """A chunk of prompts with responses of equal length."""

    prompts: PromptBatch
    tokens: Int[Tensor, "row step"]
    segment: Int[Tensor, "row step"]
    """Number in `SEGMENTS` of what a token belongs to; of a fact only its value counts."""
    answer: Int[Tensor, "row step"]
    """Number of the value in its segment that a token belongs to, from 1; 0 for none."""


def example(number: int) -> Example:
    """Return one example; each number has its own facts, sentences and topic."""
    draw = random.Random(SEED + number)
    facts = [(name, draw.choice(values)) for name, values in draw.sample(FACTS, N_NOTES + N_OWN)]
    sentences = draw.sample(FILLERS, N_SENTENCES)
    for spot, (name, value) in zip(draw.sample(range(N_SENTENCES), N_NOTES), facts, strict=False):
        sentences[spot] = f"The {name} is {value}."
    topic, second, third = CHATS[number % len(CHATS)]
    asked, *later = draw.sample(facts[:N_NOTES], N_NOTES)
    wish = draw.choice((topic, second, third)) if number >= len(CHATS) else topic
    message = (
        f"Here are some notes. {' '.join(sentences)}\n\n"
        f"What is the {asked[0]}? Then write a text about {topic}, with much about {wish}."
    )
    return Example(message, asked, tuple(later[:N_LATER]), tuple(facts[N_NOTES:]))


def examples_of(chunk: int, n_rows: int) -> list[Example]:
    """Return the examples of a chunk."""
    return [example(chunk * n_rows + row) for row in range(n_rows)]


class Writer:
    """Writes chunks of texts with a model and its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    def write(self, chunk: int, n_rows: int, n_tokens: int) -> Texts:
        """Return the texts of a chunk.

        Raises:
            ValueError: `n_tokens` leave no room for words of the model.
        """
        examples = examples_of(chunk, n_rows)
        prompts = [self._prompt(one.message) for one in examples]
        heads = [self._stated({"asked": [one.asked], OTHER: one.own}) for one in examples]
        tails = [self._stated({"later": one.later, "own": one.own}) for one in examples]
        room = [n_tokens - len(head) - len(tail) for head, tail in zip(heads, tails, strict=True)]
        if min(room) < 1:
            raise ValueError(f"{n_tokens} tokens must hold the statements and words of the model; take more")
        begun = [
            prompt + [token for token, _, _ in head] for prompt, head in zip(prompts, heads, strict=True)
        ]
        words = self._sampled(begun, max(room), chunk)
        rows = [
            [*head, *((token, SEGMENTS.index(TEXT), 0) for token in own[:n]), *tail]
            for head, own, n, tail in zip(heads, words, room, tails, strict=True)
        ]
        tokens, segment, answer = torch.tensor(rows).unbind(-1)
        return Texts(PromptBatch(*padded(prompts, self.tokenizer.eos_token_id)), tokens, segment, answer)

    def prompts(self, chunk: int, n_rows: int) -> PromptBatch:
        """Return the prompts of a chunk."""
        prompts = [self._prompt(one.message) for one in examples_of(chunk, n_rows)]
        return PromptBatch(*padded(prompts, self.tokenizer.eos_token_id))

    def _prompt(self, message: str) -> list[int]:
        if self.tokenizer.chat_template is None:  # a base model, such as Gemma 3 270M
            return [self.tokenizer.bos_token_id, *self._ids(f"Question: {message}\n\nAnswer:")]
        chat = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _stated(self, facts: dict[str, Sequence[tuple[str, str]]]) -> list[tuple[int, int, int]]:
        """Return (token, segment, value) of a sentence for each fact, by the segment of its value."""
        found = []
        for segment, stated in facts.items():
            for number, (name, value) in enumerate(stated, start=1):
                found += [(token, 0, 0) for token in self._ids(f" The {name} is")]
                found += [(token, SEGMENTS.index(segment), number) for token in self._ids(f" {value}")]
                found += [(token, 0, 0) for token in self._ids(".")]
        return found

    def _sampled(self, begun: list[list[int]], n: int, chunk: int) -> list[list[int]]:
        """Return tokens that the model samples with all keys, past end tokens."""
        input_ids, mask = padded(begun, self.tokenizer.eos_token_id)
        rollout = generate(
            self.model,
            input_ids,
            mask,
            cache=CacheSpec.dense(),
            max_new_tokens=n,
            eos_token_id=None,
            pad_token_id=self.tokenizer.eos_token_id,
            generator=stream(0, "ranking", chunk),
        )
        return rollout.input_ids[:, input_ids.shape[1] :].tolist()


def padded(rows: list[list[int]], pad: int) -> tuple[Int[Tensor, "row seq"], Bool[Tensor, "row seq"]]:
    """Return left-padded tokens, and True where there is one."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    place = torch.arange(width)
    return ids, place >= width - torch.tensor([len(row) for row in rows])[:, None]
