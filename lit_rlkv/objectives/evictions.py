"""Policy gradient of evictions: each decision of a KV head is an action."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.objectives.clipped import clipped_surrogate


@dataclass(frozen=True)
class EvictionSums:
    """Sums over the decisions of a layer; a mean over the optimizer step divides them by its decisions."""

    gain: Float[Tensor, ""]
    """Objective to maximize."""
    kl: Float[Tensor, ""]
    logps: Float[Tensor, ""]
    n_clipped: Int[Tensor, ""]


def advantages_of_decisions(
    advantages: Float[Tensor, "batch seq"],
    is_counted: Bool[Tensor, "batch seq"],
    now: Int[Tensor, "batch compaction"],
) -> Float[Tensor, "batch compaction"]:
    """Return the advantage of each compaction: that of the last counted token at or before column `now`.

    Query `now` is the first without the evicted keys, and the token at `now` was predicted by the one before
    it. So the baseline of that token is of all keys, and under GAE its advantage has the change of value that
    the eviction makes; the baselines of later tokens know of it already. A compaction before the first
    counted token takes that one's. 0 without a counted token after `now`, which the eviction could change.
    """
    column = torch.arange(is_counted.shape[1], device=now.device)
    latest = torch.where(is_counted, column, -1).cummax(dim=1).values
    first = is_counted.int().argmax(dim=1, keepdim=True)
    found = advantages.gather(1, torch.maximum(latest.gather(1, now.long()), first))
    return found.masked_fill(now >= latest[:, -1:], 0.0)


def eviction_sums(
    logps: Float[Tensor, "batch kv_head compaction"],
    old_logps: Float[Tensor, "batch kv_head compaction"],
    advantages: Float[Tensor, "batch compaction"],
    is_decision: Bool[Tensor, "batch kv_head compaction"],
    kl: Float[Tensor, "batch kv_head compaction"],
    clip: float | int,
) -> EvictionSums:
    """Return the sums of min(ratio·A, clip(ratio)·A), KL and log-prob; ratio = π/π_old of each decision.

    Args:
        clip: the ratio is clipped to [1 − clip, 1 + clip], as in `clipped_surrogate`.
    """
    advantages = advantages[:, None].expand_as(logps)
    surrogate = clipped_surrogate((logps - old_logps).flatten(1), advantages.flatten(1), clip, clip)
    is_counted = is_decision.flatten(1)
    is_clipped = surrogate.is_clipped_low | surrogate.is_clipped_high
    return EvictionSums(
        gain=surrogate.gain.masked_fill(~is_counted, 0.0).sum(),
        kl=kl.masked_fill(~is_decision, 0.0).sum(),
        logps=logps.detach().masked_fill(~is_decision, 0.0).sum(),
        n_clipped=(is_clipped & is_counted).sum(),
    )


def kl_to_uniform(
    scores: Float[Tensor, "*lead key"], is_candidate: Bool[Tensor, "*lead key"]
) -> Float[Tensor, "*lead"]:
    """Return KL(softmax(scores) ‖ uniform) over the candidates, which is log n − H.

    Survivors are drawn one by one without replacement; this is the KL of the first draw, not of their set.
    """
    is_any = is_candidate.any(-1, keepdim=True)
    logps = scores.masked_fill(is_any & ~is_candidate, -torch.inf).log_softmax(-1)
    n = is_candidate.sum(-1).clamp(min=1)
    negative_entropy = (logps.exp() * logps.masked_fill(~is_candidate, 0.0)).sum(-1)
    return negative_entropy + n.log()
