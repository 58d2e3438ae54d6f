"""Definitions of the scores that eviction policies compute from keys and a window of queries.

All functions return float32. `is_due` marks the rows whose scores will be read; all others score 0 and cost
an early exit. None means all rows. In a due row every query of the window must see at least one key.
`is_live` is False on padding.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.evict.reference import due_rows

NEAR_DUPLICATE = 0.5
"""Cosine above which two keys are near-duplicates (arXiv:2505.24133)."""
Given = ParamSpec("Given")


def in_due_rows(score: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
    """Decorate a score of all rows: it is computed in the due ones only, and 0 in all others."""
    bind = signature(score).bind
    compute: Callable[..., Tensor] = score

    @wraps(score)
    def scored(*args: Any, **named: Any) -> Tensor:
        given = bind(*args, **named).arguments
        is_due = given.pop("is_due", None)
        rows = slice(None) if is_due is None else due_rows(is_due)
        if isinstance(rows, slice):
            return compute(**given)
        scores = given["keys"].new_zeros(given["keys"].shape[:3], dtype=torch.float32)
        if len(rows) > 0:
            scores[rows] = compute(**{n: x[rows] if isinstance(x, Tensor) else x for n, x in given.items()})
        return scores

    return scored


@in_due_rows
def key_norm(
    keys: Float[Tensor, "batch kv_head slot dim"], is_due: Bool[Tensor, " batch"] | None = None
) -> Float[Tensor, "batch kv_head slot"]:
    """Return ‖k‖₂."""
    return keys.float().norm(dim=-1)


@in_due_rows
def key_direction_similarity(
    keys: Float[Tensor, "batch kv_head slot dim"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    is_due: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Return cos(k, Σ over live keys of k/‖k‖): the similarity of a key to the mean direction."""
    keys = keys.float()
    direction = (F.normalize(keys, dim=-1) * is_live.unsqueeze(-1)).sum(dim=-2, keepdim=True)
    return F.cosine_similarity(keys, direction, dim=-1)


@in_due_rows
def redundancy(
    keys: Float[Tensor, "batch kv_head slot dim"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    is_due: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Return the softmax over live keys of a key's mean cosine to the other keys (arXiv:2505.24133).

    For key j the mean is Σ_i cos(kᵢ, kⱼ) / n, without i = j and without each i whose last near-duplicate
    (cosine above 0.5) is j.
    """
    keys = F.normalize(keys.float(), dim=-1) * is_live.unsqueeze(-1)
    similarity = keys @ keys.transpose(-1, -2)
    n_slots = similarity.shape[-1]
    slot = torch.arange(n_slots, device=similarity.device)
    similarity = similarity.masked_fill(slot[:, None] == slot[None, :], 0.0)
    latest_duplicate = torch.where(similarity > NEAR_DUPLICATE, slot, -1).amax(-1, keepdim=True)
    similarity = similarity.masked_fill(slot == latest_duplicate, 0.0)
    n_live = is_live.sum(-1, keepdim=True)
    mean_similarity = similarity.sum(dim=-2) / n_live
    return mean_similarity.masked_fill(~is_live, -torch.inf).softmax(-1)


@in_due_rows
def mean_window_attention(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    columns: Int[Tensor, "batch kv_head slot"],
    query_columns: Int[Tensor, "batch window"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
    is_due: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Return the mean over window and group of the softmax over visible keys of q·k·scaling.

    A query sees the live keys of its own and of earlier columns.
    """
    return _seen_logits(queries, keys, columns, query_columns, is_live, scaling).softmax(-1).mean(dim=(2, 3))


@in_due_rows
def peak_window_attention(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    columns: Int[Tensor, "batch kv_head slot"],
    query_columns: Int[Tensor, "batch window"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    is_recent: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
    is_due: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Return the mean over the window of the softmax, over visible keys that are not recent, of the logits.

    The logit of a query and a key is the maximum over the group of q·k·scaling.
    """
    logits = _seen_logits(queries, keys, columns, query_columns, is_live, scaling).amax(dim=2)
    return logits.masked_fill(is_recent.unsqueeze(2), -torch.inf).softmax(-1).mean(dim=2)


@in_due_rows
def expected_attention(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
    is_due: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch kv_head slot"]:
    """Return ‖v‖ · mean over group of softmax over live keys of mean + variance/2 over window of q·k·scaling.

    The variance is the empirical one (not Bessel-corrected).
    """
    logits = queries.float() @ keys.float().transpose(-1, -2).unsqueeze(2) * scaling
    exponent = logits.mean(dim=3) + logits.var(dim=3, unbiased=False) / 2
    exponent = exponent.masked_fill(~is_live.unsqueeze(2), float("-inf"))
    return exponent.softmax(-1).mean(dim=2) * values.float().norm(dim=-1)


def _seen_logits(
    queries: Float[Tensor, "batch kv_head group window dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    columns: Int[Tensor, "batch kv_head slot"],
    query_columns: Int[Tensor, "batch window"],
    is_live: Bool[Tensor, "batch kv_head slot"],
    scaling: float,
) -> Float[Tensor, "batch kv_head group window slot"]:
    """Return q·k·scaling, -inf where the key is padding or later than the query."""
    logits = queries.float() @ keys.float().transpose(-1, -2).unsqueeze(2) * scaling
    is_seen = columns[:, :, None, :] <= query_columns[:, None, :, None]
    return logits.masked_fill(~(is_seen & is_live[:, :, None, :]).unsqueeze(2), -torch.inf)
