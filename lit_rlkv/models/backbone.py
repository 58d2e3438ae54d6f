"""Any transformers causal LM as a backbone: attention registered, and refused if it cannot be replayed exactly."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lit_rlkv.models.attention import ATTENTION_NAME, no_mask
from lit_rlkv.types import NEVER

REPLAYABLE_LAYERS = {"full_attention", "sliding_attention"}
PROBE_LEN = 6


def prepare_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with our attention registered and dropout off, after a proof that it can be replayed.

    The proof is a forward of a few tokens: it must equal the model's own attention, and with every key dead to all
    later queries it must equal those tokens each alone. So nothing but attention carries information between tokens.

    Raises:
        ValueError: the architecture keeps state outside attention, or changes attention in a way we do not compute.
    """
    name = type(model).__name__
    odd_layers = set(text_config(model).to_dict().get("layer_types") or []) - REPLAYABLE_LAYERS
    if odd_layers:
        raise ValueError(
            f"{name} cannot be replayed: its layers of type {', '.join(sorted(odd_layers))} keep a state that a "
            "table of evicted keys does not describe; use a model with full attention"
        )
    for module in model.modules():
        # Sampler and learner must compute one function; dropout would make them two.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        token_ids = torch.arange(2 * PROBE_LEN, device=model.device).view(2, PROBE_LEN) % model.config.vocab_size
        model.set_attn_implementation("eager")
        expected = model(token_ids, use_cache=False).logits
        model.set_attn_implementation(ATTENTION_NAME)
        _prove_replayable(model, token_ids, expected)
    model.train(was_training)
    return model


def _prove_replayable(
    model: PreTrainedModel, token_ids: Int[Tensor, "batch seq"], expected: Float[Tensor, "batch seq vocab"]
) -> None:
    name = type(model).__name__
    batch, seq_len = token_ids.shape
    position_ids = torch.arange(seq_len, device=token_ids.device).expand(batch, -1)
    nothing_dies = torch.full((batch, 1, 1, seq_len), NEVER, dtype=torch.int32, device=token_ids.device)
    try:
        dense = head_logits(model, hidden_states(model, token_ids, position_ids, death=nothing_dies))
        die_at_once = (position_ids + 1).int()[:, None, None]
        isolated = head_logits(model, hidden_states(model, token_ids, position_ids, death=die_at_once))
        alone = head_logits(
            model,
            hidden_states(
                model, token_ids.view(-1, 1), position_ids.reshape(-1, 1), death=nothing_dies.view(-1, 1, 1, 1)
            ),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} cannot be replayed: {error}") from error
    if not _is_close(dense, expected):
        raise ValueError(f"{name} cannot be replayed: its logits differ under our attention or our output head")
    if not _is_close(isolated, alone.view_as(isolated)):
        raise ValueError(
            f"{name} cannot be replayed: tokens reach each other by other ways than causal attention "
            "(convolution, recurrence, a mask of its own)"
        )


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The config of the language model, also where it is part of a larger one."""
    return model.config.get_text_config(decoder=True)


def check_length(model: PreTrainedModel, seq_len: int) -> None:
    """Refuse sequences on which a sliding window or the position table would cut attention short.

    Raises:
        ValueError: `seq_len` exceeds the narrowest window or the number of learned positions.
    """
    config = text_config(model).to_dict()
    layer_types = config.get("layer_types")
    window = config.get("sliding_window")
    slides = window is not None and (layer_types is None or "sliding_attention" in layer_types)
    if slides and seq_len > window:
        raise ValueError(
            f"{seq_len} tokens exceed the sliding window of {window} of {type(model).__name__}; keys that leave the "
            "window are not in the death table: use shorter sequences or a model with full attention"
        )
    limit = config.get("max_position_embeddings")
    if limit is not None and seq_len > limit:
        raise ValueError(
            f"prompt and response may reach {seq_len} tokens, but {type(model).__name__} has positions for {limit}; "
            "lower max_new_tokens or shorten the prompts"
        )


def hidden_states(
    model: PreTrainedModel,
    token_ids: Int[Tensor, "batch seq"],
    position_ids: Int[Tensor, "batch seq"],
    **attention: Any,
) -> Float[Tensor, "batch seq dim"]:
    """Last hidden states, with `attention` (`death=` or `slot_cache=`) handed through to the attention function."""
    output = model.base_model(
        input_ids=token_ids,
        position_ids=position_ids,
        attention_mask=no_mask(token_ids.device),
        past_key_values=attention.get("slot_cache"),
        use_cache="slot_cache" in attention,
        **attention,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def head_logits(model: PreTrainedModel, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead vocab"]:
    """The model's output head with the scalings that some families put behind it (Granite, Cohere, Gemma)."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = text_config(model).to_dict()
    if (divisor := config.get("logits_scaling")) is not None:
        logits = logits / divisor
    if (factor := config.get("logit_scale")) is not None:
        logits = logits * factor
    if (cap := config.get("final_logit_softcapping")) is not None:
        logits = (logits / cap).tanh() * cap
    return logits


def token_positions(is_token: Tensor) -> Int[Tensor, "batch seq"]:
    """Position of each token in its own sequence: padding on the left counts for nothing."""
    return (is_token.long().cumsum(dim=1) - 1).clamp(min=0)
