"""Prepare any transformers causal LM for exact replay, or raise an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.state_layer import LINEAR
from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.models.backbone import (
    CACHELESS,
    CHUNKED,
    STATEFUL,
    dense_states,
    has_states,
    head_logits,
    hidden_states,
    layer_kinds,
    optional_setting,
    text_config,
)
from lit_rlkv.models.lm_head import use_float32_logits
from lit_rlkv.models.routing import by_row, by_token, recorded_experts, replayed_experts, routers_of
from lit_rlkv.out_of_memory import is_out_of_memory
from lit_rlkv.types import NEVER, Record

REPLAYABLE_LAYERS = {
    *("full_attention", "sliding_attention", CHUNKED, "hybrid", "hybrid_sliding"),
    *STATEFUL,
    *CACHELESS,
}
PROBE_LEN = 6
WINDOWS = ("sliding_window", "attention_chunk_size")
PROBE_WINDOW = 3
"""Window during the check, which its few tokens outgrow."""


FORGETS_BETWEEN_CHUNKS: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose recurrent layers begin anew with every forward of more than one token, as Jamba's do."""


def check_chunks(model: PreTrainedModel) -> None:
    """Check that a model goes on from its states when it reads further tokens.

    Raises:
        ValueError: its recurrent layers do not.
    """
    if model in FORGETS_BETWEEN_CHUNKS:
        raise ValueError(
            f"{type(model).__name__} forgets its states when it reads given tokens after others: it takes "
            "prompts in one piece (prefill_chunk=null) and no given tokens within responses"
        )


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
            f"{name} cannot be replayed: its layers of type {', '.join(sorted(unsupported))} choose keys "
            "in a way that a table of evicted keys does not describe; use a model with full attention"
        )
    if not any(kind.attends for kind in layer_kinds(model)):
        raise ValueError(f"{name} cannot be replayed: it has no layer with attention, so no keys to evict")
    if any(kind.window is not None and kind.window < 1 for kind in layer_kinds(model)):
        raise ValueError(f"{name} has a window of less than a token; correct its config")
    if has_states(model) and LINEAR is object:
        raise ValueError(f"{name} cannot be replayed: its states need transformers 5.23 or newer")
    for module in model.modules():
        # Sampler and learner must compute the same function, so dropout is off.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    was_training, precision = model.training, torch.get_float32_matmul_precision()
    input_ids = torch.arange(2 * PROBE_LEN, device=model.device).view(2, PROBE_LEN) % config.vocab_size
    try:
        torch.set_float32_matmul_precision("highest")  # without TF32, because our kernels do not use it
        with torch.no_grad(), _short_windows(model):
            model.set_attn_implementation("eager")
            with _refused(name):
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


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Give all windows `PROBE_WINDOW` tokens within the block, in the configs and in the layers."""
    holders: list[Any] = [model.config, text_config(model), *model.modules()]
    holders += [module.config for module in model.modules() if hasattr(module, "config")]
    before = {
        (id(one), name): (one, getattr(one, name))
        for one in holders
        for name in WINDOWS
        if getattr(one, name, None)
    }
    try:
        for (_, name), (holder, _) in before.items():
            setattr(holder, name, PROBE_WINDOW)
        yield
    finally:
        for (_, name), (holder, window) in before.items():
            setattr(holder, name, window)


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
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
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
        with replayed_experts(model, None if experts is None else by_token(experts)):
            return head_logits(model, hidden_states(model, input_ids, position_ids, **attention))

    def columns(chosen: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        mine = None if experts is None else experts[..., chosen]
        return input_ids[:, chosen], position_ids[:, chosen], mine

    with _refused(name):
        dense = logits(input_ids, position_ids, experts, record=Record(never_evicted))
        isolated = logits(input_ids, position_ids, experts, record=Record(evicted_at_once))
        experts_alone = None if experts is None else by_row(by_token(experts), input_ids.numel())
        one_column = (input_ids.view(-1, 1), position_ids.reshape(-1, 1), experts_alone)
        alone = logits(*one_column, record=Record(never_evicted.view(-1, 1, 1, 1)))
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

    def decoded(*chunks: slice) -> Tensor:
        """Return the logits of the last column, after these chunks and two decode steps."""
        n_layers, kinds = text_config(model).num_hidden_layers, layer_kinds(model)
        cache = SlotCache(CacheSpec.dense(), n_layers, batch, seq_len, input_ids.device, kinds=kinds)
        is_token = torch.ones_like(input_ids, dtype=torch.bool)
        cache.begin(range(batch), is_token)
        for chunk in chunks:
            with cache.feed(range(batch), is_token[:, chunk]):
                logits(*columns(chunk), slot_cache=cache)
        for step in (slice(-2, -1), slice(-1, None)):
            cache.advance()
            found = logits(*columns(step), slot_cache=cache)
        return found

    def is_same(found: Tensor) -> bool:
        return _is_close(found, expected[:, -1:], model.dtype, ignores_outliers=True)

    with _refused(name):
        in_one_piece = decoded(slice(None, -2))
    if not is_same(in_one_piece):
        raise ValueError(f"{name} cannot be replayed: its logits change when it decodes from our cache")
    if has_states(model) and not is_same(decoded(slice(None, -4), slice(-4, -2))):
        FORGETS_BETWEEN_CHUNKS.add(model)
    if not has_states(model) and not _is_close(isolated, alone.view_as(isolated), model.dtype):
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
    return bool(head_logits(model, dense_states(model, input_ids)).isfinite().all())
