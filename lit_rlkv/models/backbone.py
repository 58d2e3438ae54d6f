"""Backbones: forwards of any prepared transformers causal LM, and facts from its config."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel

from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.shadow_attention import (
    SegmentPlan,
    SlotPlan,
    plan_segments,
    plan_slots,
    takes_segments,
)
from lit_rlkv.kvcache import SlotCache
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.models.attention import ATTENTION_NAME, Replay
from lit_rlkv.models.flat_tokens import FlatTokens
from lit_rlkv.models.lm_head import model_body
from lit_rlkv.models.routing import replayed_routing
from lit_rlkv.types import NEVER, Record

STATEFUL, CACHELESS = ("linear_attention", "conv"), ("mlp", "moe")
"""Layer types, in transformers' names, that keep a state in place of keys, and that keep nothing."""
CHUNKED = "chunked_attention"


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the config of the language model, which may be part of a multimodal config."""
    return model.config.get_text_config(decoder=True)


def check_length(model: PreTrainedModel, seq_len: int, advice: str = "shorten the texts") -> None:
    """Check that sequences of `seq_len` tokens can be replayed and fit the model.

    Args:
        advice: how to make them shorter, for the error.

    Raises:
        ValueError: `seq_len` exceeds the model's positions, or longrope's limit.
    """
    name, config = type(model).__name__, text_config(model)
    # Dynamic scaling, in contrast, changes the frequencies only beyond `max_position_embeddings`.
    limits = [
        entry["original_max_position_embeddings"]
        for entry in _rope_configs(config)
        if entry.get("rope_type") == "longrope"
    ]
    if limits and seq_len > (limit := min(limits)):
        raise ValueError(
            f"a sequence may reach {seq_len} tokens, but beyond {limit} {name} rotates all its keys "
            f"differently (longrope), which cached keys cannot follow; {advice}"
        )
    n_positions = optional_setting(config, "max_position_embeddings")
    if n_positions is not None and seq_len > n_positions:
        raise ValueError(
            f"a sequence may reach {seq_len} tokens, but {name} has positions for {n_positions}; {advice}"
        )


def _rope_configs(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE settings, of all layers and by layer type."""
    rope = optional_setting(config, "rope_parameters") or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def can_be_captured(model: PreTrainedModel) -> bool:
    """True if a forward can be captured as a CUDA graph: no communication, no device synchronization.

    Dynamic RoPE scaling always synchronizes, to read the current length, and longrope copies its factors from
    the host.
    """
    types = {entry.get("rope_type") for entry in _rope_configs(text_config(model))}
    return types.isdisjoint({"dynamic", "longrope"}) and not is_sharded(model)


def optional_setting(config: PretrainedConfig, name: str) -> Any:
    """Return a setting that only some model families have; None if it is missing."""
    return getattr(config, name, None)


def n_kv_heads(model: PreTrainedModel) -> int:
    """Return the number of KV heads of a layer."""
    config = text_config(model)
    return int(optional_setting(config, "num_key_value_heads") or config.num_attention_heads)


def layer_kinds(model: PreTrainedModel) -> list[LayerKind]:
    """Return the kind of each layer; without `layer_types` all attend, within the sliding window if any."""
    config = text_config(model)
    window, chunk = (optional_setting(config, name) for name in ("sliding_window", "attention_chunk_size"))
    default = "full_attention" if window is None else "sliding_attention"
    layer_types = optional_setting(config, "layer_types") or [default] * int(config.num_hidden_layers)
    n_states = int(optional_setting(config, "number_of_conv_states") or 1)
    return [
        LayerKind(
            attends=kind not in (*STATEFUL, *CACHELESS),
            window=chunk if kind == CHUNKED else window if "sliding" in kind else None,
            in_chunks=kind == CHUNKED,
            n_states=n_states if kind in STATEFUL or kind.startswith("hybrid") else 0,
        )
        for kind in layer_types
    ]


def table_rows(model: PreTrainedModel) -> dict[int, int] | None:
    """Return the row of an eviction table for each layer that attends; None if all layers do."""
    kinds = layer_kinds(model)
    attending = [number for number, kind in enumerate(kinds) if kind.attends]
    return None if len(attending) == len(kinds) else {number: row for row, number in enumerate(attending)}


def rope_frequencies(model: PreTrainedModel) -> Float[Tensor, " pair"] | None:
    """Return the radians per token of RoPE's pairs, of the numbers d and d + n_pairs of a head.

    None if the model has no RoPE, another or none in some layers, or one of other pairs.
    """
    found = [part for name, part in model.named_modules() if name.endswith("rotary_emb")]
    others = [optional_setting(text_config(model), name) for name in ("no_rope_layers", "qk_rope_head_dim")]
    if len(found) != 1 or any(others):
        return None
    rotate = getattr(import_module(type(found[0]).__module__), "rotate_half", None)
    is_halves = rotate is not None and rotate(torch.arange(4)).tolist() == [-2, -3, 0, 1]
    return getattr(found[0], "inv_freq", None) if is_halves else None


def has_states(model: PreTrainedModel) -> bool:
    """True if a layer keeps a state: then tokens act on later ones outside attention, too."""
    return any(kind.n_states > 0 for kind in layer_kinds(model))


def within_windows(
    model: PreTrainedModel, evicted_at: Int[Tensor, "batch layer kv_head seq"]
) -> Int[Tensor, "batch row kv_head seq"]:
    """Return an eviction table in which keys that leave a layer's window die, too.

    A table of one layer for all gets a row for each layer, if any window is shorter than the sequence.

    Args:
        evicted_at: 0 on the padding before a row.
    """
    n_columns = evicted_at.shape[-1]
    kinds = [kind for kind in layer_kinds(model) if kind.attends]
    if all(kind.window is None or kind.window >= n_columns for kind in kinds):
        return evicted_at
    column = torch.arange(n_columns, device=evicted_at.device).expand(len(evicted_at), -1)
    first = (evicted_at[:, 0, 0] > 0).int().argmax(dim=1, keepdim=True)
    never = torch.full_like(column, NEVER)
    expiry = [never if kind.window is None else kind.expiry(column, first) for kind in kinds]
    return torch.minimum(evicted_at, torch.stack(expiry, dim=1)[:, :, None].int())


def head_dims(model: PreTrainedModel) -> set[int]:
    """Return the head dimensions of all layers; one number in most families."""
    config = text_config(model)
    layers = optional_setting(config, "per_layer_config") or [config]
    return {
        int(optional_setting(layer, "head_dim") or layer.hidden_size // layer.num_attention_heads)
        for layer in layers
    }


def hidden_states(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq"],
    position_ids: Int[Tensor, "batch seq"],
    *,
    record: Record | None = None,
    slot_cache: SlotCache | None = None,
    **options: Any,
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states under replay, or over a cache.

    Args:
        record: (learner) a `Record.view`.
        slot_cache: (rollout) to write to and read from.
        options: `probe` and `flat` of `Replay`.

    Raises:
        ValueError: the model does not use our attention and would ignore these arguments; or the routing of
            the model cannot be replayed, or the record is of another architecture.
    """
    implementation = text_config(model)._attn_implementation
    if implementation != ATTENTION_NAME:
        raise ValueError(
            f"{type(model).__name__} uses {implementation!r} attention, which ignores evictions; pass the "
            "model through prepare_backbone first"
        )
    arguments: dict[str, Any] = {}
    if record is not None:
        arguments = replay_arguments(model, record, **options)
    if slot_cache is not None:
        given = None if slot_cache.incoming is None else slot_cache.incoming.is_token
        masks = forward_masks(model, given, input_ids.device)
        arguments = {"slot_cache": slot_cache, "past_key_values": slot_cache, "attention_mask": masks}
    with replayed_routing(model, record):
        hidden: Tensor = model_body(model)(
            input_ids=input_ids, position_ids=position_ids, use_cache=slot_cache is not None, **arguments
        ).last_hidden_state
    return hidden


def dense_states(
    model: PreTrainedModel, input_ids: Int[Tensor, "batch seq"], **options: Any
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states of rows without padding that see all keys; see `hidden_states`."""
    is_token = torch.ones_like(input_ids, dtype=torch.bool)
    record = Record.dense(is_token)
    return hidden_states(model, input_ids, token_positions(is_token), record=record, **options)


def replay_arguments(
    model: PreTrainedModel, record: Record, *, flat: FlatTokens | None = None, **options: Any
) -> dict[str, Any]:
    """Return what a forward of the learner passes to the model, beside tokens and positions."""
    table = within_windows(model, record.evicted_at)
    plan = _attention_plan(model, table, flat)
    replay = Replay(replace(record, evicted_at=table), table_rows(model), plan, flat=flat, **options)
    return {"replay": replay, "attention_mask": forward_masks(model, table[:, 0, 0] > 0, table.device)}


def _attention_plan(
    model: PreTrainedModel, table: Int[Tensor, "batch row kv_head seq"], flat: FlatTokens | None
) -> SlotPlan | SegmentPlan | None:
    """Return what saves work in attention: segments if they are chosen and fit, else lists for Triton."""
    parameter = next(model.parameters())
    softcap = optional_setting(text_config(model), "attn_logit_softcapping")
    if takes_segments(parameter.device.type, parameter.dtype, max(head_dims(model)), softcap):
        tokens = (None, None) if flat is None else (flat.place, flat.cells)
        if (segments := plan_segments(table, *tokens)) is not None:
            return segments
    return plan_slots(table) if uses_triton(parameter) else None


def forward_masks(
    model: PreTrainedModel, is_token: Bool[Tensor, "batch seq"] | None, device: torch.device
) -> Any:
    """Return the mask of a forward: a dummy of 4 dimensions, so that transformers builds none of its own.

    Layers with a state get one that is False on padding, which must not enter the state.
    """
    dummy = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if not has_states(model):
        return dummy
    masks = {"full_attention": dummy, "sliding_attention": dummy, **dict.fromkeys(STATEFUL, is_token)}
    return masks | {"hybrid": masks, "hybrid_sliding": masks}


def check_deterministic(model: nn.Module) -> None:
    """Check that no dropout and no noise of NEFTune is active, which would differ in sampler and learner.

    `prepare_backbone` sets dropout to 0; adapters that are injected later may bring their own.

    Raises:
        ValueError: naming the first module with either.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ValueError(
                f"{name} drops {module.p:g} of its inputs: sampler and learner would not be one function; "
                "set its rate to 0 (lora_dropout=0), or call prepare_backbone after adapters are injected"
            )
        if getattr(module, "neftune_noise_alpha", None):
            raise ValueError(
                f"{name} adds noise: sampler and learner would not be one function; leave "
                "neftune_noise_alpha out"
            )


def n_embeddings(model: PreTrainedModel) -> int:
    """Return the rows of the token embedding; often padded beyond the tokenizer's vocabulary."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return len(weight)


def head_is_frozen(model: PreTrainedModel) -> bool:
    """True if the output head is frozen, as under LoRA on the layers below it."""
    return not any(p.requires_grad for p in model.get_output_embeddings().parameters())


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead vocab"]:
    """Return the logits, with the scalings and softcaps of Granite, Cohere and Gemma, in float32 or wider."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # of a head that is no `LMHead`
    config = text_config(model)
    if (divisor := optional_setting(config, "logits_scaling")) is not None:
        logits = logits / divisor
    if (factor := optional_setting(config, "logit_scale")) is not None:
        logits = logits * factor
    if (cap := optional_setting(config, "final_logit_softcapping")) is not None:
        logits = (logits / cap).tanh() * cap
    return logits


def token_positions(attention_mask: Tensor) -> Int[Tensor, "batch seq"]:
    """Return the position of each token in its sequence, not counting left padding."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
