"""The decode loop: continuous batching of all responses, and what is passed on while it runs."""

from collections import deque
from collections.abc import Callable, Mapping

from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.rollout.decoder import DecodedRows, Decoder
from lit_rlkv.rollout.turns import Turns

READ_AT_ONCE = 2**17
"""Tokens, of whole rows, whose record is copied at a time."""
OnFinished = Callable[[list[int], Int[Tensor, "row seq"], Bool[Tensor, "row seq"]], object]
"""Called with rows of the rollout that have ended, and their `input_ids` and `response_mask` on the CPU."""


def decode_all(
    decoder: Decoder,
    input_ids: Int[Tensor, "batch prompt"],
    is_prompt: Bool[Tensor, "batch prompt"],
    num_return_sequences: int,
    check_every: int,
    on_progress: Callable[[int], object] | None = None,
    callback: "FinishedCallback | None" = None,
    turns: Turns | None = None,
) -> DecodedRows:
    """Decode all responses, in the order of their prompts; a prompt starts once enough rows are free.

    Args:
        check_every: most decode steps between checks for finished rows.
        on_progress: see `generate`.
        callback: gets all responses; its next call passes those of the last check.
        turns: decides what follows the end of a turn, with `check_every` 1; None: the response has ended.
    """
    interval = None if decoder.kv.spec.is_dense else decoder.kv.spec.interval
    waiting = deque(range(len(input_ids)))
    free = deque(range(decoder.n_rows))
    owner: dict[int, int] = {}
    n_left: dict[int, int] = {}
    done: list[int] = []
    finished: DecodedRows | None = None
    n_reported = 0

    def collect() -> None:
        nonlocal finished
        places = {row: owner.pop(row) for row in done}
        finished = collect_rows(decoder, places, num_return_sequences * len(input_ids), finished)
        free.extend(done)

    while waiting or owner:
        if not owner:
            n_steps_done = 0  # all rows start together
        prompts = [waiting.popleft() for _ in range(min(len(waiting), len(free) // num_return_sequences))]
        if prompts:
            rows = [free.popleft() for _ in range(len(prompts) * num_return_sequences)]
            decoder.prefill(rows, input_ids[prompts], is_prompt[prompts])
            samples = [
                prompt * num_return_sequences + j for prompt in prompts for j in range(num_return_sequences)
            ]
            owner |= zip(rows, samples, strict=True)
            n_left |= dict.fromkeys(rows, decoder.settings.max_new_tokens - 1)
            if turns is not None:
                done = turns.settle(owner, n_left)
        n_steps = steps_to_check(n_steps_done, check_every, interval)
        n_steps = min(n_steps, max((n_left[row] for row in owner.keys() - done), default=0))
        n_steps_done += n_steps
        if not (waiting or decoder.keeps_rows or decoder.kv.has_room(n_steps)):
            # What grows are only the rows that still run; no prompt takes the others over.
            if done:
                collect()
            kept = list(owner)
            decoder.grow(kept)
            owner = {row: owner[old] for row, old in enumerate(kept)}
            n_left = {row: n_left[old] for row, old in enumerate(kept)}
            free.clear()
        decoder.make_room(n_steps)
        for _ in range(n_steps):
            decoder.step()
        if callback is not None:
            callback.call()
        running = [row for row in owner if turns is None or not turns.is_waiting(owner[row])]
        n_left |= {row: n_left[row] - n_steps for row in running}
        if turns is None:
            is_running = decoder.is_running.tolist()
            done = [row for row in owner if not is_running[row]]
        else:
            done = turns.settle(owner, n_left)
        assert done or n_steps > 0  # otherwise the loop would never end
        decoder.kv.levels.stop(done)
        if callback is not None:
            callback.read({row: owner[row] for row in done})
        if on_progress is not None:
            n_begun = num_return_sequences * (len(input_ids) - len(waiting))
            n_unsampled = sum(n_left[row] for row in owner.keys() - done)
            n_tokens = n_begun * decoder.settings.max_new_tokens - n_unsampled
            on_progress(n_tokens - n_reported)
            n_reported = n_tokens
        if done and (waiting or len(done) == len(owner)):
            collect()
            done = []
    assert finished is not None
    return finished


def collect_rows(
    decoder: Decoder, places: Mapping[int, int], n_places: int, finished: DecodedRows | None = None
) -> DecodedRows:
    """Return finished rows of a decoder in the places of a rollout, beside those of `finished`.

    Args:
        places: by row; at least one.
    """
    rows = [*places]
    # A few at a time and in place, because memory may not hold a second copy of the record.
    n_rows = max(READ_AT_ONCE // decoder.seq_len, 1)
    for start in range(0, len(rows), n_rows):
        part = rows[start : start + n_rows]
        read = decoder.read_rows(part)
        finished = finished or read.new_empty(n_places)
        finished.write([places[row] for row in part], read)
    assert finished is not None
    return finished


class FinishedCallback:
    """Calls a function once for each response that has ended, while the device is busy with further steps.

    Tokens are read directly after a check for finished rows, when the device is idle, and passed on after the
    steps up to the next check are queued. So neither the host nor the device waits for the other.
    """

    def __init__(self, decoder: Decoder, on_finished: OnFinished) -> None:
        self._decoder = decoder
        self._on_finished = on_finished
        self._known: set[int] = set()
        self._read: tuple[list[int], Tensor, Tensor] | None = None

    def read(self, ended: Mapping[int, int]) -> None:
        """Read the responses among these that are new.

        Args:
            ended: row of the rollout by row of the decoder.
        """
        new = {row: place for row, place in ended.items() if place not in self._known}
        if new:
            self._known.update(new.values())
            self._read = (list(new.values()), *self._decoder.read_tokens(list(new)))

    def call(self) -> None:
        """Call the function with the responses that were read last, if any."""
        if self._read is not None:
            read, self._read = self._read, None
            self._on_finished(*read)


def steps_to_check(n_steps_done: int, check_every: int, interval: int | None) -> int:
    """Return the decode steps until the next check for finished rows, whose places are then filled.

    Rows are compacted every `interval` steps since their own prefill. Checks divide each interval into the
    fewest equal parts of at most `check_every` steps, so that rows that start at different checks still share
    few steps of eviction: one per interval up to `check_every`, one in about `check_every` steps beyond.

    Args:
        n_steps_done: decode steps since all rows last started together.
        interval: None for a cache that evicts nothing.
    """
    if interval is None:
        return check_every
    if interval <= check_every:
        return check_every // interval * interval
    n_parts = -(-interval // check_every)
    return min(-(-interval // n_parts), interval - n_steps_done % interval)
