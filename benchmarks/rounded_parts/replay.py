"""Codes that differ between sampler and learner, and the gap of the replay with and without them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sampled import gap, sample
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec, Rollout, replay_logps
from lit_rlkv.kernels.rounding import dequantise, quantise
from lit_rlkv.kvcache import slots
from lit_rlkv.models import attention

Coded = tuple[Tensor, Tensor]
"""Codes and scales."""


@contextmanager
def in_place_of(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a module calls `function` by this name."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def _recorder(calls: list[Coded]) -> Callable[[Tensor, str], Coded]:
    def recording(vectors: Tensor, rounding: str) -> Coded:
        calls.append(quantise(vectors, rounding))
        return calls[-1]

    return recording


def _learner(model: PreTrainedModel, rollout: Rollout, rounds: Callable[[Tensor, str], Tensor]) -> Tensor:
    with in_place_of(attention, "rounded", rounds), torch.no_grad():
        return replay_logps(model, rollout)


def measure(model: PreTrainedModel, prompts: Tensor, spec: CacheSpec, n_tokens: int) -> dict[str, Any]:
    """Return the shares of codes and scales that differ, and the gaps of three learners.

    `gap` is of the learner as it is, `given_codes` of one that takes the sampler's codes instead of its own,
    and `unrounded` of one that does not round.
    """
    calls: list[Coded] = []
    with in_place_of(slots, "quantise", _recorder(calls)):
        rollout = sample(model, prompts, spec, n_tokens)
    ignoring = _learner(model, rollout, lambda vectors, rounding: vectors)
    found: dict[str, Any] = {"n_response_tokens": int(rollout.response_mask.sum())}
    if spec.dtype is None:
        return found | {"gap": gap(ignoring, rollout)}
    n_streams = 2 * model.config.num_hidden_layers  # keys and values of each layer
    sampled = [
        tuple(torch.cat(parts, dim=2) for parts in zip(*calls[stream::n_streams], strict=True))
        for stream in range(n_streams)
    ]
    learned: list[Coded] = []
    own = _recorder(learned)

    def rounds(vectors: Tensor, rounding: str) -> Tensor:
        return dequantise(*own(vectors, rounding), rounding, vectors.dtype)

    remaining = iter(sampled)

    def takes(vectors: Tensor, rounding: str) -> Tensor:
        return dequantise(*next(remaining), rounding, vectors.dtype)

    found["gap"] = gap(_learner(model, rollout, rounds), rollout)
    found["given_codes"] = gap(_learner(model, rollout, takes), rollout)
    found["unrounded"] = gap(ignoring, rollout)
    return found | _differences(sampled, learned, spec.dtype)


def _differences(sampled: list[Coded], learned: list[Coded], rounding: str | None) -> dict[str, Any]:
    """Return the shares of numbers whose code differs, and of vectors with such a code or another scale."""
    n_codes = n_vectors = n_moved = n_touched = n_scales = 0
    for (codes, scales), (own_codes, own_scales) in zip(sampled, learned, strict=True):
        differs = codes != own_codes
        if rounding == "int4":
            both = codes ^ own_codes
            differs = torch.cat([both & 15, both >> 4], dim=-1) != 0
        other_scale = (scales != own_scales).any(-1)
        n_codes, n_vectors = n_codes + differs.numel(), n_vectors + other_scale.numel()
        n_moved, n_scales = n_moved + int(differs.sum()), n_scales + int(other_scale.sum())
        n_touched += int((differs.any(-1) | other_scale).sum())
    return {
        "n_codes": n_codes,
        "codes_moved": n_moved / n_codes,
        "scales_moved": n_scales / n_vectors,
        "vectors_moved": n_touched / n_vectors,
    }
