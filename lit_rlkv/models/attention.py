"""The attention function registered with transformers: slot cache, replay of evictions, or plain SDPA."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_rlkv.kernels.shadow_attention import (
    LayerSegments,
    SegmentPlan,
    SlotPlan,
    layer_table,
    segment_attention,
    shadow_attention,
    takes_segments,
)
from lit_rlkv.kvcache import SlotCache
from lit_rlkv.kvcache.layer import SlotLayer
from lit_rlkv.models.flat_tokens import FlatTokens
from lit_rlkv.models.quantized_view import quantized_as
from lit_rlkv.types import Record

ATTENTION_NAME = "lit_rlkv"


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of a layer's attention at replay: rotated queries and keys, and values."""

    layer: int
    """Place of the layer among those with attention."""
    query: Float[Tensor, "batch head seq dim"] | None
    key: Float[Tensor, "batch kv_head seq dim"]
    value: Float[Tensor, "batch kv_head seq dim_v"]
    scaling: float
    softcap: float | None
    flat: FlatTokens | None
    """Set if the tensors are a flat sequence, [1, head, token, dim]."""
    sink: Float[Tensor, " head"] | None = None
    """A logit of each head in the softmax, without a value."""


Probe = Callable[[AttentionInputs], None]
"""Called at replay with the inputs of each layer."""


@dataclass(frozen=True)
class Replay:
    """The record that one forward of the learner replays, as attention reads it."""

    record: Record
    table_rows: Mapping[int, int] | None = None
    """Row of the eviction table for each layer; None: its own number."""
    plan: SlotPlan | SegmentPlan | None = None
    """Made from the eviction table; saves work in the kernels. Segments are of the tokens of `flat`."""
    probe: Probe | None = None
    """Called with the inputs of each layer; does not change the output."""
    flat: FlatTokens | None = None
    """Set if queries, keys and values are a flat sequence of the tokens of the table's rows."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        number: int,
        query: Float[Tensor, "batch head seq dim"],
        key: Float[Tensor, "batch kv_head seq dim"],
        value: Float[Tensor, "batch kv_head seq dim_v"],
        scaling: float,
        softcap: float | None,
        sink: Float[Tensor, " head"] | None,
    ) -> Float[Tensor, "batch head seq dim_v"]:
        """Return the attention of layer `number`. A table of one layer or KV head is used for all."""
        layer = number if self.table_rows is None else self.table_rows[number]
        plan = None if self.plan is None else self.plan.layer(layer, key.shape[1])
        if self.record.codes is not None:
            key, value = quantized_as(self.record.codes, layer, key, value)
        if self.probe is not None:
            self.probe(AttentionInputs(layer, query, key, value, scaling, softcap, self.flat, sink))
        if isinstance(plan, LayerSegments):
            width = max(query.shape[-1], value.shape[-1])
            if takes_segments(query.device.type, query.dtype, width, softcap):
                return segment_attention(query, key, value, plan, scaling, sink)
            plan = None
        attend = partial(
            shadow_attention,
            evicted_at=layer_table(self.record.evicted_at, layer, key.shape[1]),
            scaling=scaling,
            softcap=softcap,
            plan=plan,
            sink=sink,
        )
        return attend(query, key, value) if self.flat is None else self.flat.attend(attend, query, key, value)


NOT_REPLAYED = ("position_bias", "head_mask")
"""Attention arguments that change the softmax in some models; they are not supported."""
RECORD_NAMES = ("record", "rounding", *(part.name for part in fields(Record)))
"""Arguments of a model's forward that would be ignored: its attention reads a `Replay`."""


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head slot dim"],
    value: Float[Tensor, "batch kv_head slot dim_v"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    slot_cache: SlotCache | None = None,
    replay: Replay | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch seq head dim_v"], None]:
    """Return the attention output of one layer; the signature is transformers'. Dropout is ignored.

    Args:
        slot_cache: (rollout) write the keys to this cache and attend over the cached keys.
        replay: (learner) attend to what the rollout's cache held. Without it and `slot_cache` this is SDPA,
            or plain attention if there is a softcap.
        s_aux: attention sink: a logit of each head in the softmax, without a value.

    Raises:
        ValueError: the model passes one of `NOT_REPLAYED` to its attention at replay or with a cache, or was
            called with one of `RECORD_NAMES`.
    """
    for name in RECORD_NAMES:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"a model's forward takes no {name!r} and would attend to all keys without it; replay a "
                "rollout by replay_logps, or a record by lit_rlkv.models.backbone.hidden_states"
            )
    if slot_cache is None and replay is None:
        if softcap is not None or s_aux is not None:
            return _plain_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in NOT_REPLAYED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention, which is not replayed"
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if slot_cache is not None:
        window, expected = kwargs.get("sliding_window"), slot_cache.kinds[_layer_of(module)].window
        if window is not None and window != expected:
            raise ValueError(f"{type(module).__name__} slides a window of {window} keys, not of {expected}")
        out = _attend_to_cache(module, slot_cache, query, key, value, scaling, softcap, s_aux)
    else:
        assert replay is not None
        out = replay.attend(_layer_of(module), query, key, value, scaling, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _layer_of(module: nn.Module) -> int:
    """Return the number of the layer of an attention module."""
    number = cast(int, module.layer_idx)
    if number < 0:  # as in Zamba 2
        raise ValueError(
            f"layers share one {type(module).__name__}, which does not know in which of them it is"
        )
    return number


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_to_cache(
    module: nn.Module,
    slot_cache: SlotCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Run a layer's attention over the cache outside of torch.compile, which cannot trace its state."""
    layer = cast(SlotLayer, slot_cache.layers[_layer_of(module)])
    return layer.attend(query, key, value, scaling, softcap, sink)


def _plain_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head slot dim"],
    value: Float[Tensor, "batch kv_head slot dim_v"],
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink: Float[Tensor, " head"] | None,
) -> Float[Tensor, "batch seq head dim_v"]:
    """Return attention with softcapped logits or a sink as the model's own code has it; SDPA has neither."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    if attention_mask is None:  # transformers passes no mask for plain causal attention
        n_queries, n_keys = logits.shape[-2:]
        attention_mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).tril(
            n_keys - n_queries
        )
    logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    if sink is not None:
        logits = torch.cat(
            [logits, sink.to(logits)[None, :, None, None].expand(*logits.shape[:-1], 1)], dim=-1
        )
    probs = logits.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : value.shape[-2]]
    return (probs @ value).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
