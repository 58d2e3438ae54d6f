"""Distributions of the policy under two views of a rollout: sparse and dense."""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.kernels.token_logps import chunk_of, in_chunks, policy_kl, spans_of, tempered
from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS
from lit_rlkv.models.backbone import head_logits, text_config
from lit_rlkv.models.replay import response_hidden, response_sets, scatter_to_response
from lit_rlkv.types import NEVER, Rollout


@torch.no_grad()
def view_overlap(
    model: PreTrainedModel, rollout: Rollout, temperature: float, max_logits: int = MAX_CHUNK_LOGITS
) -> Float[Tensor, "batch seq"]:
    """Return Σ_v min(μ_v, π_v) at each response token: μ sees the cached keys, π sees all keys.

    It is 1 minus their total variation distance: 1 where eviction changed nothing. Its low percentiles are
    reported to announce a collapse that the mean hides (arXiv:2606.08446).

    Args:
        max_logits: most logits of one view held at once.
    """

    sets = response_sets(rollout)

    def chunk_overlap(sparse: Tensor, dense: Tensor, *spans: Tensor) -> tuple[Tensor]:
        p_logits, q_logits = head_logits(model, sparse), head_logits(model, dense)
        kept = chunk_of(sets, spans, p_logits)
        return (logits_overlap(kept.logits(p_logits), kept.logits(q_logits), temperature),)

    hidden = [response_hidden(model, rollout, shadow=shadow) for shadow in (True, False)]
    size = max(max_logits // text_config(model).vocab_size, 1)
    (overlap,) = in_chunks(chunk_overlap, *hidden, *spans_of(sets), size=size, stores_gradients=False)
    return scatter_to_response(rollout, overlap)


def logits_overlap(
    p_logits: Float[Tensor, "*lead vocab"], q_logits: Float[Tensor, "*lead vocab"], temperature: float
) -> Float[Tensor, "*lead"]:
    """Return Σ_v min(p_v, q_v) for p, q = softmax(logits / temperature)."""
    probs = [tempered(logits, temperature).softmax(dim=-1) for logits in (p_logits, q_logits)]
    return torch.minimum(*probs).sum(dim=-1)


@torch.no_grad()
def layer_kls(
    model: PreTrainedModel, rollout: Rollout, temperature: float
) -> Float[Tensor, "layer_or_all token"]:
    """Return KL(π_layer ‖ π_dense) at each response token in nats; the last row is for all layers at once.

    In π_layer only this layer evicts its keys; every other layer sees all keys. A cache that rounds keys does
    so in all of these, π_dense too. Costs n_layers + 2 forwards.
    The effects of layers do not add up, so the full eviction table has its own row.
    """
    # On the same code path as the other views, so that a layer without evictions gives exactly 0.
    dense = response_hidden(model, _with_evictions_of(rollout, []), shadow=True)
    head, vocab_size = partial(head_logits, model), text_config(model).vocab_size
    sets = response_sets(rollout)

    def kl(view: Rollout) -> Tensor:
        hidden = response_hidden(model, view, shadow=True)
        return policy_kl(hidden, dense, head, head, temperature, vocab_size, sets=sets)

    alone = [kl(_with_evictions_of(rollout, [layer])) for layer in range(rollout.record.evicted_at.shape[1])]
    return torch.stack([*alone, kl(rollout)])


def _with_evictions_of(rollout: Rollout, layers: list[int]) -> Rollout:
    """Return the rollout with the evictions of these layers only."""
    evicted_at = torch.full_like(rollout.evicted_at, NEVER)
    evicted_at[:, layers] = rollout.evicted_at[:, layers]
    return rollout.with_record(evicted_at=evicted_at)


def has_equal_views(rollout: Rollout) -> bool:
    """True if no query lost a key and no key was rounded, so that both views of the rollout are the same."""
    if rollout.record.codes is not None:
        return False
    n_columns, is_padding = rollout.input_ids.shape[1], ~rollout.attention_mask[:, None]
    layers = map(rollout.evictions, range(rollout.record.evicted_at.shape[1]))
    return all(bool(((evicted_at >= n_columns) | is_padding).all()) for evicted_at in layers)


def evenly_spaced_rows(rollout: Rollout, n_rows: int, ranks: Ranks = SINGLE_PROCESS) -> Int[Tensor, " row"]:
    """Return the indices of `n_rows` evenly spaced responses; all of them if there are fewer.

    Args:
        ranks: choose from the responses of all ranks; the result holds this rank's rows, perhaps none.
    """
    mine = ranks.local_rows(len(rollout.input_ids))
    n = len(rollout.input_ids) * ranks.size
    rows = torch.linspace(0, n - 1, min(n_rows, n), dtype=torch.float64).round().long()
    rows = rows[(mine.start <= rows) & (rows < mine.stop)] - mine.start
    return rows.to(rollout.input_ids.device)
