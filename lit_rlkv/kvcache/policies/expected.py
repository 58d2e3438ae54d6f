"""Attention expected from future queries (Expected Attention, as in kvpress)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kvcache.policies.base import Policy, SlotView


class Expected(Policy):
    """score(k) = mean over group of softmax(μ·k·s + s²·kᵀΣk/2) · ‖v‖, q ~ N(μ, Σ), s the attention scaling.

    The Gaussian is fitted to the latest `window` queries as they were rotated, because a cache recompacts
    every few tokens; kvpress, which compresses a prompt once, fits it before RoPE and averages the rotation
    over 512 positions. With the empirical covariance, s²·kᵀΣk is the variance of the logits over the window,
    so no [dim, dim] is formed.
    """

    tracks_attention = None
    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        logits = view.queries.float() @ view.keys.float().transpose(-1, -2).unsqueeze(2) * view.scaling
        exponent = logits.mean(dim=3) + logits.var(dim=3, unbiased=False) / 2
        exponent = exponent.masked_fill(~view.is_live.unsqueeze(2), float("-inf"))
        return exponent.softmax(-1).mean(dim=2) * view.values.float().norm(dim=-1)
