"""Replay: log-probs of a rollout under the keys that its cache held at each step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.checks import check_temperature
from lit_rlkv.kernels.token_logps import TokenSets, token_logps, token_logps_and_entropy
from lit_rlkv.models.attention import Probe
from lit_rlkv.models.backbone import (
    check_length,
    head_is_frozen,
    head_logits,
    layer_kinds,
    n_embeddings,
    n_kv_heads,
    text_config,
)
from lit_rlkv.models.learner import learner_states
from lit_rlkv.types import NEVER, Codes, Rollout, SamplingMasks

_Result = TypeVar("_Result")


def response_hidden(
    model: PreTrainedModel,
    rollout: Rollout,
    *,
    shadow: bool,
    routing: bool = True,
    probe: Probe | None = None,
) -> Float[Tensor, "token dim"]:
    """Return the hidden states that predict the response tokens, row by row: one column before each token.

    `probe` is called with the inputs of each layer's attention; see `Record.view` for the others.
    """
    check_length(model, rollout.input_ids.shape[1])
    # The last column predicts no sampled token, and neither does the last token of a row.
    hidden = learner_states(
        model,
        rollout.input_ids[:, :-1],
        rollout.attention_mask[:, :-1],
        prompt_columns(rollout),
        rollout.record.view(rollout.attention_mask, shadow=shadow, routing=routing).until(-1),
        is_read=rollout.attention_mask[:, 1:],
        probe=probe,
    )
    return hidden[rollout.response_mask[:, 1:]]


def prompt_columns(rollout: Rollout) -> Int[Tensor, " batch"]:
    """Return the number of columns before the response of each row."""
    return rollout.response_mask.int().argmax(dim=1)


def response_logps(
    model: PreTrainedModel, rollout: Rollout, hidden: Float[Tensor, "token dim"], temperature: float
) -> Float[Tensor, "batch seq"]:
    """Return the log-probs of the response tokens in nats, in the rollout's columns; 0 elsewhere.

    They are of distributions over the tokens that the sampler chose from; see `Record.sampling_masks`.

    Raises:
        ValueError: `temperature` is 0 or no temperature.
    """
    return scatter_to_response(
        rollout, _read_response_tokens(token_logps, model, rollout, hidden, temperature)
    )


def response_logps_and_entropy(
    model: PreTrainedModel, rollout: Rollout, hidden: Float[Tensor, "token dim"], temperature: float
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, "batch seq"]]:
    """Return `response_logps`, and in the same columns the entropy of each token's distribution in nats."""
    logps, entropy = _read_response_tokens(token_logps_and_entropy, model, rollout, hidden, temperature)
    return scatter_to_response(rollout, logps), scatter_to_response(rollout, entropy)


def _read_response_tokens(
    read: Callable[..., _Result], model: PreTrainedModel, rollout: Rollout, hidden: Tensor, temperature: float
) -> _Result:
    check_temperature("temperature", temperature, is_greedy_allowed=False)
    tokens = rollout.input_ids[rollout.response_mask]
    return read(
        hidden,
        partial(head_logits, model),
        tokens,
        temperature,
        text_config(model).vocab_size,
        head_is_frozen=head_is_frozen(model),
        sets=response_sets(rollout),
    )


def response_sets(rollout: Rollout) -> TokenSets | None:
    """Return the tokens that each response token was chosen from; None if from the whole vocabulary.

    All distributions at the response tokens, the learner's and the reference's, are over these sets.
    """
    masks = rollout.record.sampling_masks
    return None if masks is None else TokenSets(masks.counts[rollout.response_mask], masks.token_ids)


def scatter_to_response(rollout: Rollout, values: Float[Tensor, " token"]) -> Float[Tensor, "batch seq"]:
    """Scatter the values of the response tokens to the rollout's columns; 0 elsewhere."""
    zeros = values.new_zeros(rollout.input_ids.shape)
    return zeros.masked_scatter(rollout.response_mask, values)


def check_rollout(model: PreTrainedModel, rollout: Rollout) -> None:
    """Check what is certain of a rollout that another engine may have recorded. The host waits once.

    Raises:
        ValueError: a shape or type is not that of the tokens or the model, a token or response cannot be one,
            or a key is evicted before its own query.
    """
    shape, record, is_token = rollout.input_ids.shape, rollout.evicted_at, rollout.attention_mask
    for name, part in {**vars(rollout), **vars(rollout.record)}.items():
        if isinstance(part, SamplingMasks | Codes):
            part = part.counts if isinstance(part, SamplingMasks) else part.record
        if isinstance(part, Tensor) and (*part.shape[:1], *part.shape[1:][-1:]) != shape:
            raise ValueError(
                f"{name} must have the rows and columns of input_ids {tuple(shape)} as its first and last "
                f"dimensions, got {tuple(part.shape)}"
            )
    n_layers = sum(kind.attends for kind in layer_kinds(model))
    groups = [vars(module).get("num_key_value_groups") for module in model.modules()]  # some layers have more
    n_groups = min((group for group in groups if group is not None), default=1)
    n_heads = max(n_kv_heads(model), text_config(model).num_attention_heads // n_groups)
    is_whole = record.ndim == 4 and not (record.is_floating_point() or record.dtype == torch.bool)
    if not is_whole or record.shape[1] not in (0, 1, n_layers) or not record.shape[2] <= n_heads:
        raise ValueError(
            f"evicted_at must be whole numbers [batch, layer, kv_head, seq] for {n_layers} layers and "
            f"{n_heads} KV heads, or 1 for all, got {record.dtype} {tuple(record.shape)}"
        )
    column, tokens = torch.arange(shape[1], device=is_token.device), rollout.input_ids
    first = record.flatten(1, 2).amin(dim=1) if record.numel() > 0 else torch.full_like(tokens, NEVER)
    n_tokens = n_embeddings(model)
    wrong = {
        f"input_ids must be 0 to {n_tokens - 1}, the tokens of the model": (tokens < 0)
        | (tokens >= n_tokens),
        "response_mask must be True within attention_mask alone, and after column 0": rollout.response_mask
        & (~is_token | (column == 0)),
        f"evicted_at must be at least 0, and {NEVER} (lit_rlkv.types.NEVER) for never": first < 0,
        "evicted_at must be above the key's own column, as the first that no longer sees it, on all tokens; "
        "0 is for padding": is_token & (first <= column),
    }
    found = torch.stack([each.any() for each in wrong.values()]).tolist()
    if any(found):
        raise ValueError([*wrong][found.index(True)])


@torch.no_grad()
def eviction_delays(
    model: PreTrainedModel, rollout: Rollout, delays: Sequence[int] = (-1, 0, 1)
) -> dict[int, float]:
    """Return by delay the largest |log π - log μ| of a response token, if all evictions came so much later.

    An engine whose scheduler is a step ahead may log a compaction before queries feel it. The delay of the
    smallest gap is right if that gap is float error, and `Record.delayed` then mends the record. If none is,
    something else is wrong: tokens, temperature, the order of layers or KV heads.
    """
    gaps = {}
    for delay in delays:
        moved = replace(rollout, record=rollout.record.delayed(delay))
        gap = replay_logps(model, moved) - rollout.rollout_logps
        gaps[delay] = float(gap[rollout.response_mask].abs().max())
    return gaps


def replay_logps(
    model: PreTrainedModel, rollout: Rollout, *, shadow: bool = True, temperature: float | None = None
) -> Float[Tensor, "batch seq"]:
    """Return the log-probs of the rollout's response tokens in one forward; 0 outside `response_mask`.

    Gradients flow. With `shadow` each query sees exactly the keys that the rollout's cache held, rounded as
    they were there (gradients go straight through the rounding), so with the same weights the result equals
    `rollout.rollout_logps` up to float error. Without it each query sees all earlier tokens. Either way the
    distributions are over the tokens that the sampler chose from, and routers take the experts that the
    rollout recorded, if it did.

    Args:
        temperature: of the softmax; None: the one that the rollout was sampled at.

    Raises:
        ValueError: `temperature` is 0 or no temperature, or the rollout is greedy and none is given, or it is
            too long for the model or records the experts of another architecture, or dropout or the noise of
            NEFTune is active, or `check_rollout` finds a fault.
    """
    rollout = rollout.to(rollout.input_ids.device)  # the record, which waits in host memory
    check_rollout(model, rollout)
    if temperature is None:
        if rollout.temperature == 0:
            raise ValueError(
                "the rollout is greedy, so its tokens have no log-probs to replay; sample at a temperature "
                "above 0, or give temperature=1.0 for log-probs of the model's own softmax"
            )
        temperature = rollout.temperature
    hidden = response_hidden(model, rollout, shadow=shadow)
    return response_logps(model, rollout, hidden, temperature)
