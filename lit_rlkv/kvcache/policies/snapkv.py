"""SnapKV: attention of the latest queries, smoothed over neighbouring keys (arXiv:2404.14469)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.slot_scores import mean_window_attention
from lit_rlkv.kvcache.policies.base import Policy, SlotView

POOL_KERNEL = 5


class SnapKV(Policy):
    """score(k) = avgpool5 over k of mean over window queries and group of softmax(q·k·scaling).

    The softmax runs over all keys that a query sees, the pooling over keys outside the window, as in kvpress.
    """

    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        assert view.query_columns is not None
        window = (view.queries, view.keys, view.columns, view.query_columns, view.is_live)
        attention = mean_window_attention(*window, view.scaling, view.is_due).masked_fill(view.is_recent, 0.0)
        return F.avg_pool1d(attention, POOL_KERNEL, stride=1, padding=POOL_KERNEL // 2)
