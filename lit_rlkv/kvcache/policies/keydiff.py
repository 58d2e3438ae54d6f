"""Keys unlike the others are worth keeping (arXiv:2504.15364)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kvcache.policies.base import Policy, SlotView


class KeyDiff(Policy):
    """score(k) = −cos(k, mean over live keys of k/‖k‖)."""

    tracks_attention = None
    sees_queries = False

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        keys = view.keys.float()
        direction = (F.normalize(keys, dim=-1) * view.is_live.unsqueeze(-1)).sum(dim=-2, keepdim=True)
        return -F.cosine_similarity(keys, direction, dim=-1)
