"""The learner's forward: the last hidden states of a batch under replay, each different token once."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.models.attention import Probe
from lit_rlkv.models.backbone import (
    check_deterministic,
    has_states,
    hidden_states,
    token_positions,
    within_windows,
)
from lit_rlkv.models.flat_tokens import FlatTokens, flat_tokens
from lit_rlkv.types import Record


def learner_states(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"],
    n_prompt: Int[Tensor, " batch"],
    record: Record,
    is_read: Bool[Tensor, "batch seq"] | None = None,
    probe: Probe | None = None,
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states of a batch under replay; each different token is computed once.

    Args:
        n_prompt: leading columns of each row with its prompt and the padding before it.
        record: a `Record.view`.
        is_read: True for tokens whose state or key is needed; None: all. Other states are arbitrary.
        probe: called with the inputs of each layer's attention.

    Raises:
        ValueError: see `check_deterministic`.
    """
    check_deterministic(model)
    positions = token_positions(attention_mask)
    is_token = attention_mask if is_read is None else attention_mask & is_read
    once = each_token_once(model, input_ids, positions, is_token, n_prompt, record)
    hidden = hidden_states(
        model, once.input_ids, once.positions, record=once.record, flat=once.flat, probe=probe
    )
    return once.spread(hidden)


@dataclass(frozen=True)
class ForwardInput:
    """The input of a forward of the learner, in rows or as one flat sequence."""

    input_ids: Int[Tensor, "row column"]
    positions: Int[Tensor, "row column"]
    record: Record
    flat: FlatTokens | None = None

    def spread(self, states: Float[Tensor, "row column dim"]) -> Float[Tensor, "batch seq dim"]:
        """Return the states of the batch's rows."""
        return states if self.flat is None else self.flat.spread(states[0])


def each_token_once(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq"],
    positions: Int[Tensor, "batch seq"],
    is_token: Bool[Tensor, "batch seq"],
    n_prompt: Int[Tensor, " batch"],
    record: Record,
) -> ForwardInput:
    """Return a batch as a flat sequence of its different tokens, or as it is where that is not possible.

    Args:
        is_token: True for tokens whose state or key is needed.
        n_prompt, record: see `learner_states`.
    """
    flat = None
    if not has_states(model):  # a state goes through its own row alone
        table = within_windows(model, record.evicted_at)
        flat = flat_tokens(input_ids, is_token, n_prompt, replace(record, evicted_at=table))
    if flat is None:
        return ForwardInput(input_ids, positions, record)
    tokens, places = flat.flatten_columns(input_ids), flat.flatten_columns(positions)
    return ForwardInput(tokens, places, flat.of_record(record), flat)
