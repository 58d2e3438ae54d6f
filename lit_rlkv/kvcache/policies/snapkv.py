"""The attention of an observation window, smoothed over neighbouring keys (arXiv:2404.14469)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kvcache.policies.base import Policy, SlotView, window_logits

POOL_KERNEL = 5


class SnapKV(Policy):
    """score(k) = avgpool5 over k of mean over window queries and group of softmax(q·k·scaling).

    The softmax runs over all keys that a query sees, the pooling over keys outside the window, as in kvpress.
    """

    tracks_attention = None
    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        attention = window_logits(view).softmax(-1).mean(dim=(2, 3)).masked_fill(view.is_recent, 0.0)
        return F.avg_pool1d(attention, POOL_KERNEL, stride=1, padding=POOL_KERNEL // 2)
