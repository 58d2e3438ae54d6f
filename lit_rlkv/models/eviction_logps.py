"""Log-probs of the evictions of a rollout, as actions of a trained policy: from table and keys at replay.

Nothing beside the table is recorded. Each distinct time of a layer's table is a compaction; its candidates
are the keys that were still held and not protected, and its survivors those that are evicted later, or never.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.kernels.shadow_attention import layer_table
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.scorer import KVScorer
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.models.backbone import layer_kinds
from lit_rlkv.models.replay import prompt_columns
from lit_rlkv.models.set_logps import set_logps
from lit_rlkv.types import NEVER, Rollout


@dataclass(frozen=True)
class Decisions:
    """The evictions of one layer: one decision of each KV head at each compaction of a row."""

    now: Int[Tensor, "batch compaction"]
    """First column whose query does not see the evicted keys; 0 where a row has fewer compactions."""
    is_candidate: Bool[Tensor, "batch kv_head compaction key"]
    is_kept: Bool[Tensor, "batch kv_head compaction key"]
    """True for candidates that survived."""

    @property
    def is_decision(self) -> Bool[Tensor, "batch kv_head compaction"]:
        """True where at least one candidate was evicted."""
        return (self.is_candidate & ~self.is_kept).any(-1)


def decisions_of(rollout: Rollout, layer: int, n_kv_heads: int, cache: CacheSpec) -> Decisions:
    """Return the decisions of a layer, given by its place in the table."""
    evicted_at = layer_table(rollout.evictions(layer)[:, None], layer, n_kv_heads)
    now = _compactions(evicted_at)
    first = rollout.attention_mask.int().argmax(dim=1)
    begin = first + cache.sink
    if cache.protect_prompt:
        begin = torch.maximum(begin, prompt_columns(rollout))
    column = torch.arange(evicted_at.shape[-1], device=now.device)
    is_free = (column >= begin[:, None, None]) & (column < now[..., None] - cache.window)
    time, table = now[:, None, :, None], evicted_at[:, :, None]
    is_candidate = is_free[:, None] & (table >= time)
    return Decisions(now, is_candidate, is_candidate & (table > time))


def _compactions(evicted_at: Int[Tensor, "batch kv_head seq"]) -> Int[Tensor, "batch compaction"]:
    """Return the distinct times of each row in ascending order, then zeros."""
    times = evicted_at.flatten(1).sort(dim=1).values
    is_new = _is_new_time(times)
    n_most = int(is_new.sum(dim=1).max())
    order = (~is_new).int().argsort(dim=1, stable=True)[:, :n_most]
    return times.masked_fill(~is_new, 0).gather(1, order)


def _is_new_time(times: Int[Tensor, "*lead time"]) -> Bool[Tensor, "*lead time"]:
    """True at the first of equal times of evictions, which ascend."""
    is_new = (times > 0) & (times != NEVER)
    is_new[..., 1:] &= times[..., 1:] != times[..., :-1]
    return is_new


def scored_layers(model: PreTrainedModel, n_columns: int) -> list[int]:
    """Return the layers in whose cache a policy evicts, by their places in a table of so many columns.

    A layer with a shorter window forgets by age alone.
    """
    kinds = [kind for kind in layer_kinds(model) if kind.attends]
    return [n for n, kind in enumerate(kinds) if kind.window is None or kind.window >= n_columns]


def count_decisions(rollout: Rollout, model: PreTrainedModel, scorer: nn.Module) -> Int[Tensor, " batch"]:
    """Return the number of decisions in each row, over all layers and KV heads.

    A policy evicts candidates alone, so each distinct time in the table of a head is a decision.
    """
    counts = torch.zeros(len(rollout.input_ids), dtype=torch.long, device=rollout.input_ids.device)
    for layer in scored_layers(model, rollout.input_ids.shape[1]):
        n_kv_heads = cast(KVScorer, scorer).layer(layer).n_kv_heads
        times = layer_table(rollout.evictions(layer)[:, None], layer, n_kv_heads).sort(dim=-1).values
        counts += _is_new_time(times).sum(dim=(1, 2))
    return counts


@dataclass
class KeyRecord:
    """Probe that keeps each layer's keys and values of a learner's forward, detached, until it is closed.

    A layer that is recomputed in a backward pass after that adds nothing.
    """

    layers: dict[int, AttentionInputs] = field(default_factory=dict)
    is_open: bool = True

    def __call__(self, inputs: AttentionInputs) -> None:
        """Keep the inputs of one layer, without its queries."""
        if self.is_open:
            key, value = to_autocast_dtype(inputs.key.detach(), inputs.value.detach())
            self.layers[inputs.layer] = replace(inputs, query=None, key=key, value=value)

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return and forget the keys and values [batch, kv_head, column, dim] of a layer."""
        inputs = self.layers.pop(layer)
        pair: Sequence[Tensor] = (inputs.key, inputs.value)
        if inputs.flat is not None:
            pair = [inputs.flat.spread_heads(each) for each in pair]
        return pair[0], pair[1]

    def close(self) -> None:
        """Forget everything."""
        self.layers.clear()
        self.is_open = False


def decision_scores(
    scorer: nn.Module, layer: int, keys: Tensor, values: Tensor, now: Int[Tensor, "batch compaction"]
) -> Float[Tensor, "batch kv_head compaction key"]:
    """Return the scores that the policy gives a layer's keys at each compaction.

    The scores of keys that are written after a compaction have no meaning.
    """
    column = torch.arange(keys.shape[2], device=keys.device)
    log_age = (now[..., None] - column).clamp(min=0).float().log1p()
    scores: Tensor = cast(KVScorer, scorer).layer(layer)(keys, values, log_age[:, None])
    return scores


def decision_logps(
    scores: Float[Tensor, "batch kv_head compaction key"], decisions: Decisions
) -> Float[Tensor, "batch kv_head compaction"]:
    """Return the log-prob of each decision; 0 where there is none."""
    n = scores.shape[-1]  # the last column of a rollout has no key at replay, and is no candidate
    return set_logps(scores, decisions.is_kept[..., :n], decisions.is_candidate[..., :n])
