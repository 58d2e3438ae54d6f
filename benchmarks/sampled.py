"""Rollouts in which every row writes as many tokens as it may, and the gap of their replay."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, generate


def sample(
    model: PreTrainedModel,
    prompts: Tensor,
    cache: CacheSpec,
    n_tokens: int,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Rollout:
    """Return a rollout of prompts [batch, seq] without padding; by default its tokens are those of seed 0."""
    return generate(
        model,
        prompts,
        torch.ones_like(prompts),
        cache=cache,
        max_new_tokens=n_tokens,
        eos_token_id=None,
        pad_token_id=0,
        generator=generator or torch.Generator(prompts.device).manual_seed(0),
        **options,
    )


def gap(logps: Tensor, rollout: Rollout) -> dict[str, float]:
    """Return mean, 99th percentile and largest |replayed − sampled| log-prob of a response token, in nats."""
    size = (logps - rollout.rollout_logps).abs()[rollout.response_mask].double()
    return {"mean": size.mean().item(), "p99": size.quantile(0.99).item(), "max": size.max().item()}
