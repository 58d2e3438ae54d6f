"""OpenRollout: a rollout that its caller goes on with, for trainers that run tools between turns."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.rollout.decode_loop import collect_rows
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.rollout.generate import as_rollout, check_prompts, decoding
from lit_rlkv.rollout.paused_rows import PausedRow
from lit_rlkv.rollout.turns import go_on, last_turn
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Rollout


class OpenRollout:
    """Rows of one cache that wait at the end of their turn until their sequences go on.

    The caller knows sequences alone, prompts included. A sequence belongs to the row whose tokens it begins
    with, of several to the longest one. Rows of equal tokens stand for each other, once each.

    Args:
        options: as in `generate`, where each is explained; `sampling` tells how tokens are drawn.

    Raises:
        ValueError: a prompt is refused, as by `generate`.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch prompt"],
        attention_mask: Tensor,
        *,
        cache: CacheSpec,
        max_new_tokens: int,
        eos_token_id: Sequence[int],
        pad_token_id: int,
        sampling: Sampling,
        num_return_sequences: int,
        generator: torch.Generator | None = None,
        record_routing: bool = False,
    ) -> None:
        is_prompt, n = attention_mask.bool(), num_return_sequences
        check_prompts(model, input_ids, is_prompt, max_new_tokens)
        ends = torch.tensor(eos_token_id, device=input_ids.device)
        settings = DecodeSettings(max_new_tokens, ends, pad_token_id, sampling)
        sizes, options = (n * len(input_ids), input_ids.shape[1]), {"record_routing": record_routing}
        self._decoder = Decoder(model, cache, *sizes, settings, generator, cuda_graph=None, **options)
        self._is_prompt = is_prompt.repeat_interleave(n, dim=0)
        prompts = [ids[mask].tolist() for ids, mask in zip(input_ids, is_prompt, strict=True)]
        self._tokens: list[list[int]] = [prompt for prompt in prompts for _ in range(n)]
        self._n_most = [len(prompt) + max_new_tokens for prompt in self._tokens]
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
        rows = self._find(sequences, go_on=True)
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
        rows = self._find(sequences, go_on=False)
        found = collect_rows(self._decoder, {row: place for place, row in enumerate(rows)}, len(rows))
        last = self._decoder.kv.column[rows] + 1
        return as_rollout(self._decoder, found, self._is_prompt[rows], last)

    def _find(self, sequences: Sequence[list[int]], *, go_on: bool) -> list[int]:
        """Return the row of each sequence, which has more tokens than its row if it goes on."""
        left, found = dict(enumerate(self._tokens)), []
        for place, ids in enumerate(sequences):
            # Most rows differ at their last token, so that few of their lists are copied.
            alike = (row for row, own in left.items() if ids[len(own) - 1 : len(own)] == own[-1:])
            begun = [row for row in alike if ids[: len(left[row])] == left[row]]
            begun = [row for row in begun if (len(ids) > len(left[row])) == go_on]
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
