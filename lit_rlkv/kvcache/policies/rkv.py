"""R-KV: importance minus redundancy, for the repetitive text of reasoning models (arXiv:2505.24133)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels import slot_scores
from lit_rlkv.kvcache.policies.base import Policy, SlotView

IMPORTANCE_WEIGHT = 0.1
POOL_KERNEL = 7


def importance(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """maxpool7 over keys of the mean over window queries of softmax(max over group of q·k·scaling).

    The softmax runs over the keys outside the window, as in the authors' code.
    """
    assert view.queries is not None
    assert view.query_columns is not None
    window = (view.queries, view.keys, view.columns, view.query_columns, view.is_live, view.is_recent)
    attention = slot_scores.peak_window_attention(*window, view.scaling, view.is_due)
    return F.max_pool1d(attention, POOL_KERNEL, stride=1, padding=POOL_KERNEL // 2)


def redundancy(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """softmax over keys of the mean cosine similarity to the other keys.

    The most recent near-duplicate of a key (cosine above 0.5) is not counted, so the last of a run of equal
    keys is kept.
    """
    return slot_scores.redundancy(view.keys, view.is_live, view.is_due)


class RKV(Policy):
    """score = λ·importance − (1 − λ)·redundancy, λ = 0.1."""

    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return IMPORTANCE_WEIGHT * importance(view) - (1 - IMPORTANCE_WEIGHT) * redundancy(view)
