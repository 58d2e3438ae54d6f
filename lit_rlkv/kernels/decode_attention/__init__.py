"""Decode attention: one query per sequence over a pool of slots, with the scores that eviction needs."""

from types import ModuleType

from lit_rlkv.kernels.backend import with_triton
from lit_rlkv.kernels.decode_attention import reference
from lit_rlkv.kernels.decode_attention.launch import fits

__all__ = ["decode_attention"]


def _load_kernels() -> ModuleType:
    from lit_rlkv.kernels.decode_attention import kernel

    return kernel


decode_attention = with_triton(reference.decode_attention, _load_kernels, chosen_by="query", fits=fits)
