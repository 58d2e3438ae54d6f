"""Key norm: keys of small norm attract attention, so they are kept (arXiv:2406.11430)."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kernels.slot_scores import key_norm
from lit_rlkv.kvcache.policies.base import Policy, SlotView


class KNorm(Policy):
    """score(k) = −‖k‖₂."""

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return -key_norm(view.keys, view.is_due)
