"""What eviction policies compute from keys and from a window of queries, a number for each slot.

All functions return float32. `is_due` names the rows whose scores will be read; in all others, which cost an
early exit, the scores are 0. None means all rows. A due row has a live key for every query of its window to
see.
"""

from types import ModuleType

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.slot_scores import reference

__all__ = [
    "expected_attention",
    "key_direction_similarity",
    "key_norm",
    "mean_window_attention",
    "peak_window_attention",
    "redundancy",
]


def key_norm(
    keys: Float[Tensor, "batch kv_head slot dim"],
    is_due: Bool[Tensor, " batch"] | None = None,
    *,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """‖k‖₂."""
    return _of_keys(keys, kernels).key_norm(keys, is_due)


def key_direction_similarity(
    keys: Float[Tensor, "batch kv_head slot dim"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    is_due: Bool[Tensor, " batch"] | None = None,
    *,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """cos(k, Σ over live keys of k/‖k‖): how much a key points where all keys point."""
    return _of_keys(keys, kernels).key_direction_similarity(keys, is_live, is_due)


def redundancy(
    keys: Float[Tensor, "batch kv_head slot dim"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    is_due: Bool[Tensor, " batch"] | None = None,
    *,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """softmax over live keys of the mean cosine to other keys, each of which spares one (arXiv:2505.24133).

    Spared by a key is the last of those whose cosine to it exceeds 0.5.
    """
    return _of_keys(keys, kernels).redundancy(keys, is_live, is_due)


def mean_window_attention(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    columns: Int[Tensor, "batch kv_head slot"],
    query_columns: Int[Tensor, "batch window"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
    is_due: Bool[Tensor, " batch"] | None = None,
    *,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Mean over window and group of softmax over the keys seen of q·k·scaling.

    A query sees the live keys of its own and of earlier columns.
    """
    window = (queries, keys, columns, query_columns, is_live, scaling, is_due)
    return _of_window(keys, kernels).mean_window_attention(*window)


def peak_window_attention(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    columns: Int[Tensor, "batch kv_head slot"],
    query_columns: Int[Tensor, "batch window"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    is_recent: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
    is_due: Bool[Tensor, " batch"] | None = None,
    *,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Mean over window of softmax over the keys seen that are not recent of max over group of q·k·scaling."""
    window = (queries, keys, columns, query_columns, is_live, is_recent, scaling, is_due)
    return _of_window(keys, kernels).peak_window_attention(*window)


def expected_attention(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
    is_due: Bool[Tensor, " batch"] | None = None,
    *,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """‖v‖ · mean over group of softmax over live keys of (mean + variance/2 over window of q·k·scaling).

    The variance is that of the window's logits, not an estimate of a population's.
    """
    return _of_window(keys, kernels).expected_attention(queries, keys, values, is_live, scaling, is_due)


def _of_keys(keys: Tensor, kernels: str | None) -> ModuleType:
    if not uses_triton(keys, kernels):
        return reference
    from lit_rlkv.kernels.slot_scores.keys import kernel  # not at the top: Triton exists on Linux only

    return kernel


def _of_window(keys: Tensor, kernels: str | None) -> ModuleType:
    if not uses_triton(keys, kernels):
        return reference
    from lit_rlkv.kernels.slot_scores.window import kernel  # not at the top: Triton exists on Linux only

    return kernel
