"""Turns: responses that go on once their environments have answered, with given tokens in their middle."""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.rollout.decoder import Decoder
from lit_rlkv.rollout.paused_rows import PausedRow


@runtime_checkable
class Conversations(Protocol):
    """The environments of the responses of a rollout, by the row of the rollout."""

    def ask(self, place: int, token_ids: Sequence[int]) -> "Future[Any]":
        """Pass the sampled tokens of a turn that has ended to the environment, without waiting."""

    def answer(self, place: int, answered: "Future[Any]", most_tokens: int) -> list[int]:
        """Return the tokens of the observation, at most so many; none end the response."""


@dataclass(frozen=True)
class _Waiting:
    answered: "Future[Any]"
    row: PausedRow


class Turns:
    """The responses of a decoder that wait for their environments, while the others are decoded."""

    def __init__(self, decoder: Decoder, conversations: Conversations) -> None:
        self._decoder = decoder
        self._conversations = conversations
        self._waiting: dict[int, _Waiting] = {}
        self._over: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def is_waiting(self, place: int) -> bool:
        """Return True if this response waits for its environment."""
        return place in self._waiting

    def settle(self, owner: Mapping[int, int], n_left: dict[int, int]) -> list[int]:
        """Pass on the turns that have ended, feed the answers that are there, and return the rows at an end.

        It must be called directly after each step and prefill. It waits for an answer if no row can go on
        without one.

        Args:
            owner: response by row of the decoder.
            n_left: tokens that each row has room for; updated.
        """
        n_over = len(self._over)
        while True:
            is_running = self._decoder.is_running.tolist()
            self._ask([row for row in owner if not (is_running[row] or self._is_known(owner[row]))], owner)
            is_stuck = len(self._over) == n_over and not any(is_running[row] for row in owner)
            if self._waiting and is_stuck:
                wait([each.answered for each in self._waiting.values()], return_when=FIRST_COMPLETED)
            if not self._feed_answers(owner, n_left):
                break
        return [row for row, place in owner.items() if place in self._over]

    def _is_known(self, place: int) -> bool:
        return place in self._waiting or place in self._over

    def _ask(self, rows: Sequence[int], owner: Mapping[int, int]) -> None:
        if not rows:
            return
        input_ids, response_mask = self._decoder.read_tokens(rows)
        is_turn = last_turn(response_mask)
        for number, (row, paused) in enumerate(zip(rows, self._decoder.pause(rows), strict=True)):
            token_ids = input_ids[number, is_turn[number]].tolist()
            self._waiting[owner[row]] = _Waiting(self._conversations.ask(owner[row], token_ids), paused)

    def _feed_answers(self, owner: Mapping[int, int], n_left: dict[int, int]) -> bool:
        """Feed all rows whose observation is there; return True if there were any."""
        given: dict[int, list[int]] = {}
        paused: list[PausedRow] = []
        for row, place in owner.items():
            if place not in self._waiting or not self._waiting[place].answered.done():
                continue
            waited = self._waiting.pop(place)
            token_ids = self._conversations.answer(place, waited.answered, n_left[row] - 1)
            if not token_ids:
                self._over.add(place)
                continue
            given[row] = token_ids
            n_left[row] -= len(token_ids) + 1
            paused.append(waited.row)
        if not given:
            return False
        go_on(self._decoder, given, paused)
        return True


def go_on(decoder: Decoder, given: Mapping[int, Sequence[int]], paused: Sequence[PausedRow]) -> None:
    """Put rows of a decoder back as they were paused, and feed each the tokens that it is given."""
    rows, device = list(given), decoder.newest.device
    width = max(map(len, given.values()))
    n_new = torch.tensor([*map(len, given.values())], device=device)
    tokens = torch.tensor([[0] * (width - len(ids)) + [*ids] for ids in given.values()], device=device)
    decoder.resume(rows, paused)
    decoder.feed(rows, tokens, torch.arange(width, device=device) >= width - n_new[:, None])


def turn_starts(response_mask: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """Return True on the first sampled token of each turn."""
    return response_mask & ~F.pad(response_mask[:, :-1], (1, 0))


def last_turn(response_mask: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """Return True on the sampled tokens of each row's last turn."""
    column = torch.arange(response_mask.shape[1], device=response_mask.device)
    start = (column * turn_starts(response_mask)).amax(dim=1)
    return response_mask & (column >= start[:, None])
