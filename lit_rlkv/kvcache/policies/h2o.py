"""Heavy hitters: the keys that have received most attention so far (arXiv:2306.14048)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kvcache.policies.base import Policy, SlotView


class H2O(Policy):
    """score(k) = Σ of the attention of all queries since k was written, mean over the query group."""

    tracks_attention = "sum"

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.attention is not None
        return view.attention
