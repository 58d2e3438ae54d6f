"""Bytes and flops that an operation cannot do without, by formula: what shares of a ceiling are shares of.

Bytes count each input read once and each output written once, whatever a kernel reads twice. Flops count a
product and its sum as two, and no recomputation.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Work of one call."""

    n_bytes: int
    n_flops: int


def decode_work(pairs: int, group: int, slots: int, dim: int, itemsize: int, n_score_passes: int) -> Work:
    """Keys and values of `pairs` (row, KV head), queries and outputs; scores in float32 so often.

    Flops: q·k and p·v for every query head and slot.
    """
    pool = 2 * pairs * slots * dim * itemsize
    heads = 2 * pairs * group * dim * itemsize
    return Work(pool + heads + n_score_passes * pairs * slots * 4, 4 * pairs * group * slots * dim)


def attention_work(
    n_visible: int, batch: int, n_heads: int, n_kv_heads: int, seq: int, dim: int, itemsize: int
) -> Work:
    """Forward and backward of attention over `n_visible` pairs of a query head's query and a key.

    Flops: two products forward (q·k, p·v), five backward (q·k, dO·v, and the three gradients), as flash
    attention is usually counted. Bytes: query, output forward and backward, their gradients; keys, values and
    the same; log-sum-exp in float32 written and read.
    """
    head_bytes = batch * seq * dim * itemsize
    lse = 2 * batch * n_heads * seq * 4
    return Work(6 * (n_heads + n_kv_heads) * head_bytes + lse, 14 * dim * n_visible)


def head_work(
    n_positions: int, dim: int, vocab: int, itemsize: int, n_products: int, n_weight_passes: int
) -> Work:
    """Products of [position, dim], [dim, vocab] and their gradients; logits count as no bytes.

    Args:
        n_products: of 2·position·dim·vocab flops each.
        n_weight_passes: how often the whole head's weights, or their gradient, are read or written.
    """
    weights, hidden = n_weight_passes * vocab * dim, 2 * n_positions * dim
    return Work((weights + hidden) * itemsize, 2 * n_products * n_positions * dim * vocab)


def sampling_work(n_rows: int, vocab: int, itemsize: int) -> Work:
    """Logits read once; a token, its log-prob and an entropy are too few bytes to count."""
    return Work(n_rows * vocab * itemsize, 0)


def score_work(pools: int, slots: int, n_vectors: int, dim: int, itemsize: int, n_flops: int = 0) -> Work:
    """`n_vectors` pools of [slot, dim] read, for each (row, KV head) a float32 a slot written."""
    return Work(pools * slots * (n_vectors * dim * itemsize + 4), n_flops)


def evict_work(pools: int, slots: int, n_moved: int, n_dead: int, dim: int, itemsize: int) -> Work:
    """Scores and columns read; keys and values that change place, of all pools, read and written.

    Columns (int64) of what moves and the evictions (int32) are written.
    """
    small = pools * slots * (4 + 8) + n_moved * 8 + n_dead * 4
    return Work(small + 4 * n_moved * dim * itemsize, 0)
