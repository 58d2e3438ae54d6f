"""Attention sinks and the most recent keys (arXiv:2309.17453)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kvcache.policies.base import Policy, SlotView


class Streaming(Policy):
    """score(k) = position of k; the sinks are protected by the cache."""

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return view.columns.float()
