"""Uniformly random eviction, as a baseline."""

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kvcache.policies.base import Policy, SlotView


class Random(Policy):
    """score(k) ~ U(0, 1), drawn anew at each compaction and independently for each KV head."""

    draws = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        shape, device = view.columns.shape, view.columns.device
        return torch.rand(shape, generator=view.generator, device=device, dtype=torch.float32)
