"""generate(): prefill, decode, evict, stop."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.models.backbone import check_length, head_logits, hidden_states, text_config, token_positions
from lit_rlkv.rollout.sampling import sample
from lit_rlkv.types import NEVER, Rollout

STOP_CHECK_EVERY = 16
"""Steps between looks at whether all rows are done: on an accelerator each look waits for the device."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    token_ids: Int[Tensor, "batch prompt"],
    attention_mask: Tensor,
    *,
    cache: CacheSpec,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Sample a response to each prompt from a cache of fixed size, and record what the sampler saw.

    Args:
        model: from `prepare_backbone`.
        token_ids: left-padded prompts; `attention_mask` as in transformers, 0 or False on padding.
        eos_token_id: token or tokens that end a response and belong to it; None to always write all tokens.
        temperature: of the softmax; 0 decodes greedily, and every log-prob is 0, that of a certain event.
        generator: on the model's device; the same state gives the same rollout.

    Raises:
        ValueError: prompts that are empty or not left-padded, or too long for the model.
    """
    is_prompt = attention_mask.bool()
    _check_prompts(model, token_ids, is_prompt, max_new_tokens, temperature)
    batch, n_prompt = token_ids.shape
    device = token_ids.device
    check_every = 1 if device.type == "cpu" else STOP_CHECK_EVERY
    eos_list = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or [])
    eos_ids = torch.tensor(eos_list, dtype=torch.long, device=device)

    kv = SlotCache(cache, text_config(model).num_hidden_layers, is_prompt, max_new_tokens, generator)
    positions = token_positions(is_prompt)
    next_position = positions[:, -1:] + 1
    sequence = torch.full((batch, n_prompt + max_new_tokens), pad_token_id, device=device)
    sequence[:, :n_prompt] = token_ids
    logps = torch.zeros(sequence.shape, device=device, dtype=torch.float32)
    is_action = torch.zeros(sequence.shape, dtype=torch.bool, device=device)
    is_running = torch.ones(batch, dtype=torch.bool, device=device)

    hidden = hidden_states(model, token_ids, positions, slot_cache=kv)
    end = n_prompt + max_new_tokens
    for column in range(n_prompt, end):
        token, logp = sample(head_logits(model, hidden[:, -1]), temperature, generator)
        sequence[:, column] = token.where(is_running, pad_token_id)
        logps[:, column] = logp.where(is_running, 0.0)
        is_action[:, column] = is_running
        is_running &= ~torch.isin(token, eos_ids)
        n_decoded = column - n_prompt
        if column == end - 1 or (n_decoded % check_every == 0 and not is_running.any()):
            end = column + 1
            break
        kv.advance(n_decoded)
        newest = sequence[:, column : column + 1]
        hidden = hidden_states(model, newest, next_position + n_decoded, slot_cache=kv)
    return _trim(sequence, is_prompt, is_action, logps, kv, end)


def _trim(
    token_ids: Tensor, is_prompt: Tensor, is_action: Tensor, logps: Tensor, kv: SlotCache, end: int
) -> Rollout:
    """Cut the unused columns, and forget deaths after the last query that predicted an action of the row."""
    is_action = is_action[:, :end]
    # Not every run of columns ends with an action: the stop check may come a few steps late.
    end = int(is_action.any(dim=0).nonzero().max()) + 1
    is_action = is_action[:, :end]
    is_token = is_action.clone()
    is_token[:, : is_prompt.shape[1]] = is_prompt
    column = torch.arange(end, device=token_ids.device)
    last_action = (column * is_action).amax(dim=1)
    death = kv.death[..., :end]
    death = death.masked_fill(death > last_action[:, None, None, None] - 1, NEVER)
    death = death.masked_fill(~is_token[:, None, None], 0)
    return Rollout(
        token_ids=token_ids[:, :end],
        is_token=is_token,
        is_action=is_action,
        sampler_logps=logps[:, :end],
        death=death,
        kv_bytes=kv.kv_bytes,
    )


def _check_prompts(
    model: PreTrainedModel,
    token_ids: Int[Tensor, "batch prompt"],
    is_prompt: Tensor,
    max_new_tokens: int,
    temperature: float,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} leaves nothing to sample; give at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; use 0 for greedy decoding, else above 0")
    if is_prompt.shape != token_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(is_prompt.shape)} but token_ids {tuple(token_ids.shape)}; "
            "give one entry for each token"
        )
    if token_ids.numel() == 0:
        raise ValueError(
            f"token_ids of shape {tuple(token_ids.shape)} hold no prompt; give at least one token"
        )
    if not is_prompt[:, -1].all() or (is_prompt[:, 1:] < is_prompt[:, :-1]).any():
        raise ValueError(
            "a prompt is empty or not left-padded; put padding first, so that each row of attention_mask "
            "reads 0...0 1...1"
        )
    check_length(model, token_ids.shape[1] + max_new_tokens)
