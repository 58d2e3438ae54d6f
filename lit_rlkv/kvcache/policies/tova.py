"""TOVA keeps what the last query attended to, the same keys in all heads (arXiv:2401.06104)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kvcache.policies.base import Policy, SlotView


class Tova(Policy):
    """score(k) = attention of the last query to k, mean over all heads of the layer."""

    tracks_attention = "last"

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.attention is not None
        return view.attention.mean(dim=1, keepdim=True).expand_as(view.attention)
