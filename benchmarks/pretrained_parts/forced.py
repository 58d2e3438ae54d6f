"""Given responses under an evicting cache, token by token, beside the model with all keys."""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.distributions import logits_overlap
from lit_rlkv.kernels.token_logps.reference import chosen_logps, kl_of_logits
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import head_logits
from lit_rlkv.models.replay import response_hidden
from lit_rlkv.rollout import score_tokens
from lit_rlkv.types import PromptBatch, Rollout


@dataclass(frozen=True)
class Reference:
    """Responses of the model with all keys, and the hidden states that predicted them."""

    prompts: PromptBatch
    tokens: Int[Tensor, "batch step"]
    is_token: Bool[Tensor, "batch step"]
    hidden: Float[Tensor, "batch step dim"]
    eos_token_ids: Int[Tensor, " eos"]


@torch.no_grad()
def reference_of(
    model: PreTrainedModel, prompts: PromptBatch, rollout: Rollout, eos_token_ids: Int[Tensor, " eos"]
) -> Reference:
    """Return the responses of a dense rollout with their hidden states, from one forward."""
    response = slice(prompts.input_ids.shape[1], None)
    hidden = response_hidden(model, rollout, shadow=False)
    is_token = rollout.response_mask[:, response]
    scattered = hidden.new_zeros(*is_token.shape, hidden.shape[-1])
    scattered[is_token] = hidden
    return Reference(prompts, rollout.input_ids[:, response], is_token, scattered, eos_token_ids)


@dataclass(frozen=True)
class Compared:
    """Statistics of each response token; without meaning outside `is_token`."""

    logps: Float[Tensor, "batch step"]
    """Log-prob of the token under the evicting cache."""
    dense_logps: Float[Tensor, "batch step"]
    kl: Float[Tensor, "batch step"]
    """KL(μ ‖ π) in nats: μ sees the cached keys, π all keys."""
    overlap: Float[Tensor, "batch step"]
    """Σ_v min(μ_v, π_v)."""
    is_top: Bool[Tensor, "batch step"]
    """True where the token is the most probable one under the evicting cache."""
    kv_bytes: int
    decode_seconds: float
    """Seconds of all decode steps, without the statistics."""


@torch.no_grad()
def compare(
    model: PreTrainedModel, reference: Reference, cache: CacheSpec, generator: torch.Generator
) -> Compared:
    """Decode the responses of the reference under a cache, and compare each token's distributions."""
    steps: list[tuple[Tensor, ...]] = []
    times: list[tuple[float, float]] = []

    def read(logits: Tensor) -> None:
        step, started_at = len(steps), time.perf_counter()
        dense, token = head_logits(model, reference.hidden[:, step]), reference.tokens[:, step]
        steps.append(
            (
                chosen_logps(logits, token, 1.0),
                chosen_logps(dense, token, 1.0),
                kl_of_logits(logits, dense, 1.0),
                logits_overlap(logits, dense, 1.0),
                logits.argmax(-1) == token,
            )
        )
        times.append((started_at, time.perf_counter()))

    rollout = score_tokens(
        model,
        reference.prompts.input_ids,
        reference.prompts.attention_mask,
        reference.tokens,
        reference.is_token,
        cache=cache,
        generator=generator,
        on_logits=read,
    )
    seconds = sum(after[0] - before[1] for before, after in pairwise(times))
    values = [torch.stack(found, dim=1) for found in zip(*steps, strict=True)]
    return Compared(*values, kv_bytes=rollout.kv_bytes, decode_seconds=seconds)
