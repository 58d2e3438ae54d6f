"""Given responses under an evicting cache, token by token, beside the model with all keys."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.distributions import logits_overlap
from lit_rlkv.kernels.token_logps.reference import chosen_logps, kl_of_logits
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import head_logits
from lit_rlkv.models.replay import response_hidden
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.settings import Sampling
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


class ForcedDecoder(Decoder):
    """Decodes given tokens instead of sampled ones, and shows the logits of each step to `read`."""

    tokens: Int[Tensor, "row step"]
    read: Callable[[int, Tensor], None]
    n_read = 0

    def _append(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]) -> None:
        self.read(self.n_read, logits)
        wanted = self.tokens[rows, self.n_read]
        self.n_read += 1
        # At temperature 0 the token of the highest logit is taken.
        super()._append(rows, torch.zeros_like(logits).scatter_(1, wanted[:, None], 1.0))


@torch.no_grad()
def compare(
    model: PreTrainedModel, reference: Reference, cache: CacheSpec, generator: torch.Generator
) -> Compared:
    """Decode the responses of the reference under a cache, and compare each token's distributions."""
    n_rows, n_steps = reference.tokens.shape
    settings = DecodeSettings(n_steps, reference.eos_token_ids, 0, Sampling(0.0))
    columns = reference.prompts.input_ids.shape[1]
    decoder = ForcedDecoder(model, cache, n_rows, columns, settings, generator, cuda_graph=False)
    steps: list[tuple[Tensor, ...]] = []
    reading = 0.0

    def read(step: int, logits: Tensor) -> None:
        nonlocal reading
        started_at = time.perf_counter()
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
        reading += time.perf_counter() - started_at

    decoder.tokens, decoder.read = reference.tokens, read
    decoder.prefill(range(n_rows), reference.prompts.input_ids, reference.prompts.attention_mask)
    reading, started_at = 0.0, time.perf_counter()
    for _ in range(n_steps - 1):
        decoder.step()
    seconds = time.perf_counter() - started_at - reading
    values = [torch.stack(found, dim=1) for found in zip(*steps, strict=True)]
    return Compared(*values, kv_bytes=decoder.kv.kv_bytes, decode_seconds=seconds)
