"""Attention expected from future queries (Expected Attention, as in kvpress)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kernels.slot_scores import expected_attention
from lit_rlkv.kvcache.policies.base import Policy, SlotView


class Expected(Policy):
    """score(k) = mean over group of softmax(μ·k·s + s²·kᵀΣk/2) · ‖v‖, q ~ N(μ, Σ), s the attention scaling.

    The Gaussian is fitted to the latest `window` queries as they were rotated, because a cache recompacts
    every few tokens; kvpress, which compresses a prompt once, fits it before RoPE and averages the rotation
    over 512 positions. With the empirical covariance, s²·kᵀΣk is the variance of the logits over the window,
    so no [dim, dim] is formed.
    """

    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        return expected_attention(
            view.queries, view.keys, view.values, view.is_live, view.scaling, view.is_due
        )
