"""Eviction: keep the keys of highest score, compact the pool in place, record the evictions."""

from types import ModuleType

import torch

from lit_rlkv.kernels.backend import TRITON_DTYPES, with_triton
from lit_rlkv.kernels.evict import reference
from lit_rlkv.kernels.evict.reference import (
    choose_survivors,
    due_rows,
    n_kept,
    record_evictions,
    take_slots,
)

__all__ = ["choose_survivors", "due_rows", "evict", "n_kept", "record_evictions", "take_slots"]


def _load_kernels() -> ModuleType:
    from lit_rlkv.kernels.evict import kernel

    return kernel


evict = with_triton(reference.evict, _load_kernels, chosen_by="keys", dtypes=(*TRITON_DTYPES, torch.uint8))
