"""KeyDiff keeps the keys that differ most from the others (arXiv:2504.15364)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kernels.slot_scores import key_direction_similarity
from lit_rlkv.kvcache.policies.base import Policy, SlotView


class KeyDiff(Policy):
    """score(k) = −cos(k, mean over live keys of k/‖k‖)."""

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return -key_direction_similarity(view.keys, view.is_live, view.is_due)
