"""Conversations of token ids, without a tokenizer or environments."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Timer
from typing import Any

from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.types import Rollout
from tests.models_zoo import VOCAB
from tests.rollouts import LONG, roll_out

ENDS = (5, 6, 7, 8)
"""Several end tokens, so that turns end soon."""


class Talk:
    """Answers each turn with 1 to 9 tokens, up to `max_turns`, after up to `delay_s`; keeps what passed."""

    def __init__(self, max_turns: int = 4, delay_s: float = 0.0, seed: int = 0) -> None:
        self.max_turns, self.delay_s, self.rng = max_turns, delay_s, random.Random(seed)
        self.turns: dict[int, list[list[int]]] = {}
        self.given: dict[int, list[list[int]]] = {}

    def ask(self, place: int, token_ids: Sequence[int]) -> "Future[bool]":
        turns = self.turns.setdefault(place, [])
        turns.append(list(token_ids))
        future: Future[bool] = Future()
        goes_on = len(turns) < self.max_turns
        if self.delay_s:
            Timer(self.delay_s * self.rng.random(), future.set_result, [goes_on]).start()
        else:
            future.set_result(goes_on)
        return future

    def answer(self, place: int, answered: "Future[bool]", most_tokens: int) -> list[int]:
        n = 1 + (3 * place + 5 * len(self.turns[place])) % 9
        if not answered.result() or n > most_tokens:
            return []
        self.given.setdefault(place, []).append([self.rng.randrange(1, VOCAB) for _ in range(n)])
        return self.given[place][-1]


def talk_through(model: PreTrainedModel | str, cache: CacheSpec | str, talk: Talk, **options: Any) -> Rollout:
    """Sample two responses to each prompt, which go on after the answers of `talk`."""
    settings: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": ENDS, "num_return_sequences": 2}
    return roll_out(model, cache, LONG, conversations=talk, **settings | options)
