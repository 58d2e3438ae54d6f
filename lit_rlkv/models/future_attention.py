"""The attention that keys receive from later queries, in blocks of queries: memory is linear in length."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.models.attention import AttentionInputs

BLOCK_NUMBERS = 2**23
"""Most numbers in a block [batch, head, query, key]; a block has at least one query."""


def future_attention(
    inputs: AttentionInputs, is_token: Bool[Tensor, "batch seq"], window: int
) -> Float[Tensor, "batch kv_head seq"]:
    """Return m_t = max over group of Σ_{d ≥ t + w} p(d → t) / max(1, S − t − w), p dense causal attention.

    Args:
        inputs: of a layer that sees all keys; not a flat sequence.
        is_token: False on padding, before and after the tokens of a row; the last of them is at S − 1.
        window: w; it has the query itself.
    """
    assert inputs.query is not None
    n_rows, n_heads, n_columns, dim = inputs.query.shape
    n_kv_heads = inputs.key.shape[1]
    queries = inputs.query.float().view(n_rows, n_kv_heads, -1, n_columns, dim)
    keys = inputs.key.float()[:, :, None].mT
    column = torch.arange(n_columns, device=keys.device)
    total = queries.new_zeros(queries.shape[:-1])
    for rows in _blocks(n_rows * n_heads, n_columns):
        logits = queries[:, :, :, rows] @ keys * inputs.scaling
        if inputs.softcap is not None:
            logits = (logits / inputs.softcap).tanh() * inputs.softcap
        delay = column[rows, None] - column
        is_seen = is_token[:, None] & (delay >= 0)
        logits = logits.masked_fill(~is_seen[:, None, None], -torch.inf)
        mass = logits.logsumexp(-1, keepdim=True)
        if inputs.sink is not None:
            mass = torch.logaddexp(mass, inputs.sink.float().view(n_kv_heads, -1, 1, 1))
        is_later = is_token[:, rows, None] & (delay >= window)
        total += (logits - mass).exp().masked_fill(~is_later[:, None, None], 0.0).sum(dim=-2)
    end = torch.where(is_token, column + 1, 0).amax(dim=1, keepdim=True)
    return total.amax(dim=2) / (end - column - window).clamp(min=1)[:, None]


def last_kept(
    target: Float[Tensor, "batch kv_head seq"], is_candidate: Bool[Tensor, "batch seq"], n_kept: int
) -> Int[Tensor, "batch kv_head seq"]:
    """Return for each key the column of the `n_kept`-th best candidate before it; -1 if there are fewer."""
    n_rows, n_heads, n_columns = target.shape
    column = torch.arange(n_columns, device=target.device)
    edges = torch.full_like(target, -1, dtype=torch.long)
    for rows in _blocks(n_rows * n_heads, n_columns) if n_kept < n_columns else ():
        is_earlier = is_candidate[:, None, None] & (column < column[rows, None])
        values, best = target[:, :, None].masked_fill(~is_earlier, -torch.inf).topk(n_kept, dim=-1)
        edges[:, :, rows] = best[..., -1].masked_fill(values[..., -1].isinf(), -1)
    return edges


def _blocks(n_heads: int, n_columns: int) -> Iterator[slice]:
    size = max(BLOCK_NUMBERS // (n_heads * n_columns), 1)
    return (slice(begin, begin + size) for begin in range(0, n_columns, size))
