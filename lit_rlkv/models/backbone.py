"""Backbones: prepare any transformers causal LM for exact replay, or raise an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.shadow_attention import plan_slots
from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.models.flat_tokens import flat_tokens
from lit_rlkv.models.lm_head import use_float32_logits
from lit_rlkv.models.routing import by_row, by_token, recorded_experts, replayed_experts, routers_of
from lit_rlkv.types import NEVER

REPLAYABLE_LAYERS = {"full_attention", "sliding_attention"}
PROBE_LEN = 6


def prepare_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Register our attention, make logits float32, set dropout to 0, check that replay is exact.

    The check runs a few tokens. In training mode, and when decoding from our cache, the logits must equal
    those of the model's own attention in evaluation mode. With every key evicted right after its own query,
    the logits must equal those of each token alone: only attention carries information between tokens.

    Returns:
        The same model.

    Raises:
        ValueError: the architecture keeps state outside attention, or its attention is not supported.
    """
    name = type(model).__name__
    config = text_config(model)
    unsupported = set(optional_setting(config, "layer_types") or []) - REPLAYABLE_LAYERS
    if unsupported:
        raise ValueError(
            f"{name} cannot be replayed: its layers of type {', '.join(sorted(unsupported))} keep state that "
            "a table of evicted keys does not describe; use a model with full attention"
        )
    for module in model.modules():
        # Sampler and learner must compute the same function, so dropout is off.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    was_training, precision = model.training, torch.get_float32_matmul_precision()
    input_ids = torch.arange(2 * PROBE_LEN, device=model.device).view(2, PROBE_LEN) % config.vocab_size
    try:
        torch.set_float32_matmul_precision("highest")  # without TF32, because our kernels do not use it
        with torch.no_grad():
            model.set_attn_implementation("eager")
            expected, experts = _own_logits(model.eval(), input_ids)
            model.set_attn_implementation(ATTENTION_NAME)
            use_float32_logits(model)
            if text_config(model)._attn_implementation != ATTENTION_NAME:
                raise ValueError(
                    f"{name} cannot be replayed: it does not look its attention up in transformers' "
                    "AttentionInterface; use a model that does"
                )
            _check_replayable(model.train(), input_ids, expected, experts)
    finally:
        torch.set_float32_matmul_precision(precision)
        model.train(was_training)
    return model


def _own_logits(
    model: PreTrainedModel, input_ids: Int[Tensor, "batch seq"]
) -> tuple[Float[Tensor, "batch seq vocab"], Int[Tensor, "batch router expert seq"] | None]:
    """Return the logits of the model as it is, and in 16 bit the experts that its routers chose.

    There rounding alone can flip an expert, and so change all logits of a token.
    """
    try:
        routers = [] if _is_wide(model.dtype) else routers_of(model)
    except ValueError:  # no routers, or some that cannot be replayed
        routers = []
    if not routers:
        return model(input_ids, use_cache=False).logits, None
    with recorded_experts(routers) as read:
        return model(input_ids, use_cache=False).logits, by_row(read(), len(input_ids))


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Refuse a model whose forward fails within the block."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{name} cannot be replayed: {error}") from error


def _check_replayable(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq"],
    expected: Float[Tensor, "batch seq vocab"],
    experts: Int[Tensor, "batch router expert seq"] | None,
) -> None:
    name = type(model).__name__
    batch, seq_len = input_ids.shape
    position_ids = torch.arange(seq_len, device=input_ids.device).expand(batch, -1)
    never_evicted = torch.full((batch, 1, 1, seq_len), NEVER, dtype=torch.int32, device=input_ids.device)
    evicted_at_once = (position_ids + 1).int()[:, None, None]

    def logits(input_ids: Tensor, position_ids: Tensor, experts: Tensor | None, **attention: Any) -> Tensor:
        hidden = hidden_states(model, input_ids, position_ids, expert_ids=experts, **attention)
        return head_logits(model, hidden)

    def columns(chosen: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        mine = None if experts is None else experts[..., chosen]
        return input_ids[:, chosen], position_ids[:, chosen], mine

    with _refused(name):
        dense = logits(input_ids, position_ids, experts, evicted_at=never_evicted)
        isolated = logits(input_ids, position_ids, experts, evicted_at=evicted_at_once)
        experts_alone = None if experts is None else by_row(by_token(experts), input_ids.numel())
        one_column = (input_ids.view(-1, 1), position_ids.reshape(-1, 1), experts_alone)
        alone = logits(*one_column, evicted_at=never_evicted.view(-1, 1, 1, 1))
    if not expected.isfinite().all():
        raise ValueError(
            f"{name} computes logits that are not finite: its weights are broken or overflow "
            f"{model.dtype}; use another checkpoint or precision"
        )
    if not _is_close(dense, expected, model.dtype, ignores_outliers=True):
        raise ValueError(
            f"{name} cannot be replayed: its logits change under our attention (it may not pass on the "
            "attention arguments), with our output head or in training mode; set any dropout that is not an "
            "nn.Dropout to 0 in its config"
        )
    with _refused(name):  # one decode step after a prefill of the other columns
        n_layers = text_config(model).num_hidden_layers
        cache = SlotCache(CacheSpec.dense(), n_layers, batch, seq_len, input_ids.device)
        with cache.prefill(range(batch), torch.ones_like(input_ids[:, :-1], dtype=torch.bool)):
            logits(*columns(slice(None, -1)), slot_cache=cache)
        cache.advance()
        decoded = logits(*columns(slice(-1, None)), slot_cache=cache)
    if not _is_close(decoded, expected[:, -1:], model.dtype, ignores_outliers=True):
        raise ValueError(f"{name} cannot be replayed: its logits change when it decodes from our cache")
    if not _is_close(isolated, alone.view_as(isolated), model.dtype):
        raise ValueError(
            f"{name} cannot be replayed: information flows between tokens outside causal attention "
            "(convolution, recurrence, a custom mask)"
        )


def _is_close(
    actual: Float[Tensor, "batch seq vocab"],
    expected: Float[Tensor, "batch seq vocab"],
    dtype: torch.dtype,
    *,
    ignores_outliers: bool = False,
) -> bool:
    """True if the logits agree at every position.

    Args:
        dtype: precision of the model.
        ignores_outliers: in 16 bit, at half of the positions is enough. Pretrained models have activations so
            large that there rounding alone can change all logits of a position.
    """
    is_wide = _is_wide(dtype)
    errors = (actual - expected).abs().amax(dim=-1)
    error = errors.median() if ignores_outliers and not is_wide else errors.max()
    return bool(error <= (1e-4 if is_wide else 5e-2) * expected.abs().max())


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


@torch.no_grad()
def has_finite_logits(model: PreTrainedModel) -> bool:
    """True if the logits of a few tokens are finite under the active adapter."""
    input_ids = torch.arange(PROBE_LEN, device=model.device)[None] % text_config(model).vocab_size
    position_ids = torch.arange(PROBE_LEN, device=model.device)[None]
    never_evicted = torch.full((1, 1, 1, PROBE_LEN), NEVER, dtype=torch.int32, device=model.device)
    hidden = hidden_states(model, input_ids, position_ids, evicted_at=never_evicted)
    return bool(head_logits(model, hidden).isfinite().all())


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the config of the language model, which may be part of a multimodal config."""
    return model.config.get_text_config(decoder=True)


def check_length(model: PreTrainedModel, seq_len: int) -> None:
    """Check that sequences of `seq_len` tokens can be replayed and fit the model.

    Raises:
        ValueError: `seq_len` exceeds the sliding window, the model's positions, or longrope's limit.
    """
    name, config = type(model).__name__, text_config(model)
    layer_types = optional_setting(config, "layer_types")
    window = optional_setting(config, "sliding_window")
    slides = layer_types is None or "sliding_attention" in layer_types
    if window is not None and slides and seq_len > window:
        raise ValueError(
            f"{seq_len} tokens exceed the sliding window of {window} of {name}; keys that leave it are "
            "not in the eviction table: use shorter sequences or a model with full attention"
        )
    # Dynamic scaling, in contrast, changes the frequencies only beyond `max_position_embeddings`.
    limits = [
        entry["original_max_position_embeddings"]
        for entry in _rope_configs(config)
        if entry.get("rope_type") == "longrope"
    ]
    if limits and seq_len > (limit := min(limits)):
        raise ValueError(
            f"prompt and response may reach {seq_len} tokens, but beyond {limit} {name} rotates all "
            "its keys differently (longrope), which cached keys cannot follow; use shorter sequences"
        )
    n_positions = optional_setting(config, "max_position_embeddings")
    if n_positions is not None and seq_len > n_positions:
        raise ValueError(
            f"prompt and response may reach {seq_len} tokens, but {name} has positions for {n_positions}; "
            "lower max_new_tokens or shorten the texts"
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
    expert_ids: Int[Tensor, "batch router expert seq"] | None = None,
    **attention: Any,
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states; `evicted_at=`, `probe=` or `slot_cache=` go to the attention function.

    Args:
        expert_ids: experts that the routers take, as in a `Rollout`; None: they choose for themselves.

    Raises:
        ValueError: the model does not use our attention and would ignore these arguments; or the routing of
            the model cannot be replayed, or `expert_ids` are of another architecture.
    """
    implementation = text_config(model)._attn_implementation
    if implementation != ATTENTION_NAME:
        raise ValueError(
            f"{type(model).__name__} uses {implementation!r} attention, which ignores evictions; pass the "
            "model through prepare_backbone first"
        )
    evicted_at = attention.get("evicted_at")
    if evicted_at is not None and uses_triton(next(model.parameters())):
        attention["plan"] = plan_slots(evicted_at)
    with replayed_experts(model, None if expert_ids is None else by_token(expert_ids)):
        hidden: Tensor = model.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            # A dummy 4-D mask, so that transformers builds none of its own.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
            past_key_values=attention.get("slot_cache"),
            use_cache="slot_cache" in attention,
            **attention,
        ).last_hidden_state
    return hidden


def learner_states(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"],
    n_prompt: Int[Tensor, " batch"],
    evicted_at: Int[Tensor, "batch layer kv_head seq"],
    is_read: Bool[Tensor, "batch seq"] | None = None,
    expert_ids: Int[Tensor, "batch router expert seq"] | None = None,
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states of a batch under replay; each different token is computed once.

    Args:
        n_prompt: leading columns of each row with its prompt and the padding before it.
        is_read: True for tokens whose state or key is needed; None: all. Other states are arbitrary.
        expert_ids: see `hidden_states`.
    """
    positions = token_positions(attention_mask)
    is_token = attention_mask if is_read is None else attention_mask & is_read
    flat = flat_tokens(input_ids, is_token, n_prompt, evicted_at, expert_ids)
    if flat is None:
        return hidden_states(model, input_ids, positions, evicted_at=evicted_at, expert_ids=expert_ids)
    tokens, places = flat.flatten(input_ids)[None], flat.flatten(positions)[None]
    experts = None if expert_ids is None else flat.flatten(expert_ids.movedim(-1, 1)).movedim(0, -1)[None]
    return flat.spread(
        hidden_states(model, tokens, places, evicted_at=evicted_at, expert_ids=experts, flat=flat)[0]
    )


def is_sharded(module: nn.Module) -> bool:
    """True if any layer is sharded by FSDP, whether or not it is gathered now."""
    return any(isinstance(m, FSDPModule) for m in module.modules())


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
