"""Attention that the keys of a prompt receive at prefill: the initial scores of h2o and tova."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_PROMPT_LOGITS = 2**26
"""Most logits held at once: 256 MiB in float32."""


def prompt_attention(
    query: Float[Tensor, "batch kv_head group prompt dim"],
    key: Float[Tensor, "batch kv_head prompt dim"],
    is_prompt: Bool[Tensor, "batch prompt"],
    scaling: float,
    softcap: float | None,
    sink: Float[Tensor, "kv_head group"] | None = None,
    *,
    last_only: bool,
) -> Float[Tensor, "batch kv_head prompt"]:
    """Return the attention that each key received, mean over the query group.

    With `last_only` it is the attention of the last query, otherwise the sum over all queries.
    """
    n_columns = key.shape[2]
    column = torch.arange(n_columns, device=key.device)
    received = torch.zeros(key.shape[:3], device=key.device, dtype=torch.float32)
    n_queries = max(MAX_PROMPT_LOGITS // (query[:, :, :, 0, 0].numel() * n_columns), 1)
    for block in torch.split(column[n_columns - 1 if last_only else 0 :], n_queries):
        logits = (query[:, :, :, block] @ key.transpose(-1, -2).unsqueeze(2)).float() * scaling
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        is_seen = is_prompt[:, None] & (column <= block[:, None])
        logits = logits.masked_fill(~is_seen[:, None, None], -torch.inf)
        if sink is not None:  # it takes a share, and receives nothing
            own = sink.float()[None, :, :, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, own], dim=-1)
        probs = logits.softmax(-1)[..., :n_columns]
        is_query = is_prompt[:, None, None, block][..., None]
        received += probs.masked_fill(~is_query, 0.0).sum(dim=3).mean(dim=2)
    return received
