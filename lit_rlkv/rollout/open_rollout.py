"""OpenRollout: a rollout that its caller goes on with, for trainers that run tools between turns."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.rollout.decode_loop import collect_rows
from lit_rlkv.rollout.generate import as_rollout, checked_decoder, decoding
from lit_rlkv.rollout.paused_rows import PausedRow
from lit_rlkv.rollout.turns import go_on, last_turn
from lit_rlkv.types import Rollout


class OpenRollout:
    """Rows of one cache that wait at the end of their turn until their sequences go on.

    The caller knows sequences alone, prompts included. A sequence belongs to the row whose tokens it begins
    with, of several to the longest one. Rows of equal tokens stand for each other, once each.

    Args:
        model: model from `prepare_backbone`.
        input_ids: left-padded prompts, whose first turns are sampled at once.
        attention_mask: 0 or False on padding.
        options: further arguments of `checked_decoder`; `max_new_tokens` counts given tokens too.

    Raises:
        ValueError: as by `generate`.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch prompt"],
        attention_mask: Tensor,
        *,
        num_return_sequences: int = 1,
        **options: Any,
    ) -> None:
        n, is_prompt = num_return_sequences, attention_mask.bool()
        self._decoder = checked_decoder(model, input_ids, is_prompt, num_return_sequences=n, **options)
        self._is_prompt = is_prompt.repeat_interleave(n, dim=0)
        prompts = [ids[mask].tolist() for ids, mask in zip(input_ids, is_prompt, strict=True)]
        self._tokens: list[list[int]] = [prompt for prompt in prompts for _ in range(n)]
        self._n_most = [len(prompt) + self._decoder.settings.max_new_tokens for prompt in self._tokens]
        self._paused: dict[int, PausedRow] = {}
        rows = range(self._decoder.n_rows)
        with decoding(self._decoder):
            self._decoder.prefill(rows, input_ids, is_prompt)
            self._finish_turns(rows)
        self.sequences = [*self._tokens]
        """The prompts with their first turns, in the order of the rows of `generate`."""

    @torch.no_grad()
    def go_on(self, sequences: Sequence[list[int]]) -> list[list[int]]:
        """Feed rows what is new in their sequences, and return the tokens of their next turns.

        A turn is empty if `max_new_tokens` leaves no room for it.

        Raises:
            ValueError: no row that is left begins a sequence, or one is too long.
        """
        rows = self._find(sequences, n_new=1)
        given: dict[int, list[int]] = {}
        for row, ids in zip(rows, sequences, strict=True):
            new, self._tokens[row] = ids[len(self._tokens[row]) :], ids
            if len(ids) == self._n_most[row]:
                self._decoder.end(row, new)
            else:
                given[row] = new
        if given:
            self._decoder.forget_graph()
            with decoding(self._decoder):
                go_on(self._decoder, given, [self._paused.pop(row) for row in given])
                self._finish_turns([*given])
        return [self._tokens[row][len(ids) :] for row, ids in zip(rows, sequences, strict=True)]

    def close(self, sequences: Sequence[list[int]]) -> Rollout:
        """Return the rows of whole sequences, in this order, and free the cache.

        Raises:
            ValueError: a sequence is not that of a row.
        """
        rows = self._find(sequences, n_new=0)
        found = collect_rows(self._decoder, {row: place for place, row in enumerate(rows)}, len(rows))
        last = self._decoder.kv.column[rows] + 1
        return as_rollout(self._decoder, found, self._is_prompt[rows], last)

    def _find(self, sequences: Sequence[list[int]], n_new: int) -> list[int]:
        """Return the row of each sequence, which has at least so many new tokens; none at all for 0."""
        left, found = dict(enumerate(self._tokens)), []
        for place, ids in enumerate(sequences):
            begun = [row for row, own in left.items() if _begins(own, ids, n_new)]
            if not begun:
                raise ValueError(
                    f"sequence {place} of {len(ids)} tokens is that of no row; give its turns as they were "
                    "sampled, then new tokens"
                )
            found.append(max(begun, key=lambda row: len(left[row])))
            del left[found[-1]]
        return found

    def _finish_turns(self, rows: Sequence[int]) -> None:
        """Decode until the turns of these rows have ended, and put each aside as it ends."""
        decoder, running = self._decoder, [*rows]
        while True:
            is_running = decoder.is_running.tolist()
            if ended := [row for row in running if not is_running[row]]:
                self._paused |= zip(ended, decoder.pause(ended), strict=True)
            running = [row for row in running if is_running[row]]
            if not running:
                break
            decoder.make_room(1)
            decoder.step()
        input_ids, response_mask = decoder.read_tokens(rows)
        for row, ids, is_turn in zip(rows, input_ids, last_turn(response_mask), strict=True):
            self._tokens[row] = [*self._tokens[row], *ids[is_turn].tolist()]


def _begins(own: list[int], ids: list[int], n_new: int) -> bool:
    """Return True if a sequence begins with a row's own tokens; the last one differs first."""
    n = len(own)
    is_long_enough = n + n_new <= len(ids) if n_new > 0 else n == len(ids)
    return is_long_enough and ids[n - 1] == own[-1] and ids[:n] == own
