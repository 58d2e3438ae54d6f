"""Importance against redundancy, for the repetitive text of reasoning models (arXiv:2505.24133)."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kvcache.policies.base import Policy, SlotView, window_logits

IMPORTANCE_WEIGHT = 0.1
NEAR_DUPLICATE = 0.5
POOL_KERNEL = 7


def importance(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """maxpool7 over keys of the mean over window queries of softmax(max over group of q·k·scaling).

    The softmax runs over the keys outside the window, as in the authors' code.
    """
    logits = window_logits(view).amax(dim=2).masked_fill(view.is_recent.unsqueeze(2), -torch.inf)
    attention = logits.softmax(-1).mean(dim=2)
    return F.max_pool1d(attention, POOL_KERNEL, stride=1, padding=POOL_KERNEL // 2)


def redundancy(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """softmax over keys of the mean cosine similarity to the other keys.

    Each key spares its most recent near-duplicate (cosine above 0.5), so that of a run of equal keys the last
    one stays.
    """
    keys = F.normalize(view.keys.float(), dim=-1) * view.is_live.unsqueeze(-1)
    similarity = keys @ keys.transpose(-1, -2)
    n_slots = similarity.shape[-1]
    slot = torch.arange(n_slots, device=similarity.device)
    similarity = similarity.masked_fill(slot[:, None] == slot[None, :], 0.0)
    latest_duplicate = torch.where(similarity > NEAR_DUPLICATE, slot, -1).amax(-1, keepdim=True)
    similarity = similarity.masked_fill(slot == latest_duplicate, 0.0)
    n_live = view.is_live.sum(-1, keepdim=True)
    mean_similarity = similarity.sum(dim=-2) / n_live
    return mean_similarity.masked_fill(~view.is_live, -torch.inf).softmax(-1)


class RKV(Policy):
    """score = λ·importance − (1 − λ)·redundancy, λ = 0.1."""

    tracks_attention = None
    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return IMPORTANCE_WEIGHT * importance(view) - (1 - IMPORTANCE_WEIGHT) * redundancy(view)
