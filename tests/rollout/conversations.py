"""Conversations of token ids, without a tokenizer or environments."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Timer

from tests.models_zoo import VOCAB


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
