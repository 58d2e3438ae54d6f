"""Decode attention: one query per sequence over a pool of slots, with the scores that eviction needs."""

from lit_rlkv.kernels.decode_attention.reference import decode_attention

__all__ = ["decode_attention"]
