"""Any transformers causal LM as a backbone: attention registered, or a refusal if replay is not exact."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.shadow_attention import plan_slots
from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.models.attention import ATTENTION_NAME, no_mask
from lit_rlkv.types import NEVER

REPLAYABLE_LAYERS = {"full_attention", "sliding_attention"}
PROBE_LEN = 6


def prepare_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with our attention registered and dropout off, after a proof that it can be replayed.

    The proof is a forward of a few tokens: in training mode it must equal the model's own attention in
    evaluation mode, also when it decodes from our cache, and with every key dead to all later queries it must
    equal those tokens each alone. So nothing but attention carries information between tokens.

    Raises:
        ValueError: the architecture keeps state outside attention, or changes attention in a way we do not
            compute.
    """
    name = type(model).__name__
    config = text_config(model)
    odd_layers = set(optional_setting(config, "layer_types") or []) - REPLAYABLE_LAYERS
    if odd_layers:
        raise ValueError(
            f"{name} cannot be replayed: its layers of type {', '.join(sorted(odd_layers))} keep state that "
            "a table of evicted keys does not describe; use a model with full attention"
        )
    for module in model.modules():
        # Sampler and learner must compute one function; dropout would make them two.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    was_training = model.training
    input_ids = torch.arange(2 * PROBE_LEN, device=model.device).view(2, PROBE_LEN) % config.vocab_size
    try:
        with torch.no_grad(), _float32_products():
            model.set_attn_implementation("eager")
            expected = model.eval()(input_ids, use_cache=False).logits
            model.set_attn_implementation(ATTENTION_NAME)
            if not _has_our_attention(model):
                raise ValueError(
                    f"{name} cannot be replayed: it computes attention in code of its own; use a model that "
                    "looks its attention up by name"
                )
            _prove_replayable(model.train(), input_ids, expected)
    finally:
        model.train(was_training)
    return model


@contextmanager
def _float32_products() -> Iterator[None]:
    """Without TF32, in which the model's own attention would differ from kernels that do not use it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _prove_replayable(
    model: PreTrainedModel, input_ids: Int[Tensor, "batch seq"], expected: Float[Tensor, "batch seq vocab"]
) -> None:
    name = type(model).__name__
    batch, seq_len = input_ids.shape
    position_ids = torch.arange(seq_len, device=input_ids.device).expand(batch, -1)
    nothing_dies = torch.full((batch, 1, 1, seq_len), NEVER, dtype=torch.int32, device=input_ids.device)
    try:
        dense = head_logits(model, hidden_states(model, input_ids, position_ids, evicted_at=nothing_dies))
        die_at_once = (position_ids + 1).int()[:, None, None]
        isolated = head_logits(model, hidden_states(model, input_ids, position_ids, evicted_at=die_at_once))
        alone = head_logits(
            model,
            hidden_states(
                model,
                input_ids.view(-1, 1),
                position_ids.reshape(-1, 1),
                evicted_at=nothing_dies.view(-1, 1, 1, 1),
            ),
        )
        decoded = _decoded_logits(model, input_ids, position_ids)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{name} cannot be replayed: {error}") from error
    if not expected.isfinite().all():
        raise ValueError(
            f"{name} computes logits that are not finite, so its weights are broken or overflow their "
            f"precision, {expected.dtype}; use another checkpoint or precision"
        )
    if not _is_close(dense, expected):
        raise ValueError(
            f"{name} cannot be replayed: its logits change under our attention (to which it may not hand on "
            "what it is given), with our output head or in training mode; dropout that is no nn.Dropout must "
            "be 0 in its config"
        )
    if not _is_close(decoded, expected[:, -1:]):
        raise ValueError(f"{name} cannot be replayed: its logits change when it decodes from our cache")
    if not _is_close(isolated, alone.view_as(isolated)):
        raise ValueError(
            f"{name} cannot be replayed: tokens reach each other by other ways than causal attention "
            "(convolution, recurrence, a mask of its own)"
        )


def _decoded_logits(
    model: PreTrainedModel, input_ids: Int[Tensor, "batch seq"], position_ids: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch 1 vocab"]:
    """Logits of the last column as the sampler computes them: the rest is prefilled, that token decoded."""
    n_layers, (batch, seq_len) = text_config(model).num_hidden_layers, input_ids.shape
    cache = SlotCache(CacheSpec.dense(), n_layers, batch, seq_len, input_ids.device)
    with cache.prefill(range(batch), torch.ones_like(input_ids[:, :-1], dtype=torch.bool)):
        hidden_states(model, input_ids[:, :-1], position_ids[:, :-1], slot_cache=cache)
    cache.advance()
    return head_logits(model, hidden_states(model, input_ids[:, -1:], position_ids[:, -1:], slot_cache=cache))


def _has_our_attention(model: PreTrainedModel) -> bool:
    return text_config(model)._attn_implementation == ATTENTION_NAME


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The config of the language model, also where it is part of a larger one."""
    return model.config.get_text_config(decoder=True)


def check_length(model: PreTrainedModel, seq_len: int) -> None:
    """Refuse sequences on which a window or the rotation of keys would change attention.

    Raises:
        ValueError: `seq_len` exceeds the sliding window, the model's positions, or what one rotation covers.
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
    switch = _rope_switch(config)
    if switch is not None and seq_len > switch:
        raise ValueError(
            f"prompt and response may reach {seq_len} tokens, but beyond {switch} {name} rotates all "
            "its keys differently (longrope), which cached keys cannot follow; use shorter sequences"
        )
    limit = optional_setting(config, "max_position_embeddings")
    if limit is not None and seq_len > limit:
        raise ValueError(
            f"prompt and response may reach {seq_len} tokens, but {name} has positions for {limit}; lower "
            "max_new_tokens or shorten the texts"
        )


def _rope_switch(config: PretrainedConfig) -> int | None:
    """Length beyond which the rotary frequencies depend on the length itself; None where they never do.

    The other such kind, dynamic scaling, sets in at `max_position_embeddings`.
    """
    switches = [
        entry["original_max_position_embeddings"]
        for entry in _ropes(config)
        if entry.get("rope_type") == "longrope"
    ]
    return min(switches, default=None)


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """How keys are rotated: in all layers, or by the kind of layer."""
    rope = optional_setting(config, "rope_parameters") or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def can_be_captured(model: PreTrainedModel) -> bool:
    """True if a forward can be captured as a CUDA graph: no communication, no device synchronisation.

    Dynamic scaling asks for the length so far, whether or not it has to do anything about it.
    """
    is_asking = any(entry.get("rope_type") == "dynamic" for entry in _ropes(text_config(model)))
    return not is_asking and not is_sharded(model)


def optional_setting(config: PretrainedConfig, name: str) -> Any:
    """A setting that only some families have, under whichever name they give it."""
    return getattr(config, name, None)


def n_kv_heads(model: PreTrainedModel) -> int:
    """KV heads of a layer."""
    config = text_config(model)
    return int(optional_setting(config, "num_key_value_heads") or config.num_attention_heads)


def head_dims(model: PreTrainedModel) -> set[int]:
    """Dimensions of an attention head: one number, but for families in which layers differ."""
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
    **attention: Any,
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states; `evicted_at=`, `probe=` or `slot_cache=` go to the attention function.

    Raises:
        ValueError: the model does not compute our attention, so it would take no notice.
    """
    if not _has_our_attention(model):
        raise ValueError(
            f"{type(model).__name__} computes {text_config(model)._attn_implementation!r} attention, which "
            "knows nothing of evicted keys; pass the model through prepare_backbone first"
        )
    evicted_at = attention.get("evicted_at")
    if evicted_at is not None and uses_triton(next(model.parameters())):
        attention["plan"] = plan_slots(evicted_at)
    output = model.base_model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=no_mask(input_ids.device),
        past_key_values=attention.get("slot_cache"),
        use_cache="slot_cache" in attention,
        **attention,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def is_sharded(module: nn.Module) -> bool:
    """True if its layers are sharded, also while they are gathered to compute."""
    return any(isinstance(one, FSDPModule) for one in module.modules())


def n_embedded(model: PreTrainedModel) -> int:
    """Tokens that the model has an embedding for: at least those of its tokenizer, often padded to more."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return len(weight)


def head_is_frozen(model: PreTrainedModel) -> bool:
    """True if the output head is frozen, as under LoRA on the layers below it."""
    return not any(p.requires_grad for p in model.get_output_embeddings().parameters())


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead vocab"]:
    """The model's output head with the scalings that some families put behind it (Granite, Cohere, Gemma)."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = text_config(model)
    if (divisor := optional_setting(config, "logits_scaling")) is not None:
        logits = logits / divisor
    if (factor := optional_setting(config, "logit_scale")) is not None:
        logits = logits * factor
    if (cap := optional_setting(config, "final_logit_softcapping")) is not None:
        logits = (logits / cap).tanh() * cap
    return logits


def token_positions(attention_mask: Tensor) -> Int[Tensor, "batch seq"]:
    """Position of each token in its own sequence: padding on the left counts for nothing."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
