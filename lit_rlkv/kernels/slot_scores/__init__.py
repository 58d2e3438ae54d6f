"""Scores that eviction policies compute from keys and a window of queries, one number for each slot."""

from types import ModuleType

from lit_rlkv.kernels.backend import with_triton
from lit_rlkv.kernels.slot_scores import reference

__all__ = [
    "expected_attention",
    "key_direction_similarity",
    "key_norm",
    "mean_window_attention",
    "peak_window_attention",
    "redundancy",
]


def _load_keys_kernel() -> ModuleType:
    from lit_rlkv.kernels.slot_scores import keys_kernel

    return keys_kernel


def _load_window_kernel() -> ModuleType:
    from lit_rlkv.kernels.slot_scores import window_kernel

    return window_kernel


key_norm = with_triton(reference.key_norm, _load_keys_kernel, chosen_by="keys")
key_direction_similarity = with_triton(
    reference.key_direction_similarity, _load_keys_kernel, chosen_by="keys"
)
redundancy = with_triton(reference.redundancy, _load_keys_kernel, chosen_by="keys")
mean_window_attention = with_triton(reference.mean_window_attention, _load_window_kernel, chosen_by="keys")
peak_window_attention = with_triton(reference.peak_window_attention, _load_window_kernel, chosen_by="keys")
expected_attention = with_triton(reference.expected_attention, _load_window_kernel, chosen_by="keys")
