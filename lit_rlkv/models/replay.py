"""The learner's side: log-probs of a rollout under exactly the keys that the sampler still had."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kernels.token_logps import token_logps, token_logps_and_entropy
from lit_rlkv.models.backbone import (
    check_length,
    head_is_frozen,
    head_logits,
    hidden_states,
    text_config,
    token_positions,
)
from lit_rlkv.types import NEVER, Rollout

_Found = TypeVar("_Found")


def dense_evicted_at(attention_mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch 1 1 seq"]:
    """The eviction table of a cache that evicts nothing: only padding is dead, from its birth."""
    return torch.where(attention_mask, NEVER, 0).int()[:, None, None]


def replay_evicted_at(rollout: Rollout) -> Int[Tensor, "batch layer kv_head seq"]:
    """The rollout's eviction table, with padding dead on both sides of the sequence, and all else at its end.

    So the queries of padding see nothing, and what follows a row's last token costs nothing.
    """
    column = torch.arange(rollout.input_ids.shape[1], device=rollout.input_ids.device)
    end = (column * rollout.attention_mask).amax(dim=1) + 1
    evicted_at = torch.minimum(rollout.evicted_at, end[:, None, None, None].int())
    return evicted_at.masked_fill(~rollout.attention_mask[:, None, None], 0)


def response_hidden(model: PreTrainedModel, rollout: Rollout, *, shadow: bool) -> Float[Tensor, "action dim"]:
    """Hidden states that predict the actions, row by row: those of the column before each action."""
    check_length(model, rollout.input_ids.shape[1])
    evicted_at = replay_evicted_at(rollout) if shadow else dense_evicted_at(rollout.attention_mask)
    # The last column predicts nothing that was sampled.
    hidden = hidden_states(
        model,
        rollout.input_ids[:, :-1],
        token_positions(rollout.attention_mask)[:, :-1],
        evicted_at=evicted_at[..., :-1],
    )
    return hidden[rollout.response_mask[:, 1:]]


def response_logps(
    model: PreTrainedModel, rollout: Rollout, hidden: Float[Tensor, "action dim"], temperature: float
) -> Float[Tensor, "batch seq"]:
    """Log-probs of the actions in nats, in the rollout's columns; 0 elsewhere.

    Raises:
        ValueError: `temperature` is 0 or less.
    """
    return scatter_to_response(rollout, _of_actions(token_logps, model, rollout, hidden, temperature))


def response_logps_and_entropy(
    model: PreTrainedModel, rollout: Rollout, hidden: Float[Tensor, "action dim"], temperature: float
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, "batch seq"]]:
    """`response_logps`, and in the same columns the entropy of each action's distribution, in nats."""
    logps, entropy = _of_actions(token_logps_and_entropy, model, rollout, hidden, temperature)
    return scatter_to_response(rollout, logps), scatter_to_response(rollout, entropy)


def _of_actions(
    read: Callable[..., _Found], model: PreTrainedModel, rollout: Rollout, hidden: Tensor, temperature: float
) -> _Found:
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} has no log-probs, because greedy decoding draws nothing; raise it"
        )
    tokens = rollout.input_ids[rollout.response_mask]
    return read(
        hidden,
        partial(head_logits, model),
        tokens,
        temperature,
        text_config(model).vocab_size,
        head_is_frozen=head_is_frozen(model),
    )


def scatter_to_response(rollout: Rollout, values: Float[Tensor, " action"]) -> Float[Tensor, "batch seq"]:
    """Values of the actions, row by row, in the rollout's columns; 0 elsewhere."""
    zeros = values.new_zeros(rollout.input_ids.shape)
    return zeros.masked_scatter(rollout.response_mask, values)


def replay_logps(
    model: PreTrainedModel, rollout: Rollout, *, shadow: bool = True, temperature: float = 1.0
) -> Float[Tensor, "batch seq"]:
    """Log-probs of the rollout's actions in one forward; 0 outside `response_mask`. Gradients flow.

    With `shadow` each query sees exactly the keys that the sampler's cache still held, so the result equals
    `rollout.rollout_logps` up to float error while the weights are the same; without it all earlier tokens.

    Args:
        temperature: the sampler's, because log-probs are those of the distribution sampled.

    Raises:
        ValueError: `temperature` is 0 or less, or the rollout is too long for the model.
    """
    hidden = response_hidden(model, rollout, shadow=shadow)
    return response_logps(model, rollout, hidden, temperature)
