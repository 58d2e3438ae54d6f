"""Activations for the backward pass of a backbone: layer inputs alone, on the device or in host memory.

A layer that is recomputed runs its MLP and its norms in tiles of tokens (arXiv:2506.13996): activations of
an MLP are the widest, and norms keep copies in float32. Gradients are those of the plain layers but for
rounding.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_rlkv.models.adapters import adapter_states, lora_layers, use_states
from lit_rlkv.models.routing import given_experts, replayed_experts

TILE = 4096
"""Tokens of which a recomputed MLP or norm keeps activations at a time."""
MLP_NAMES = ("mlp", "feed_forward")
ROUTING_NAMES = ("gate", "router", "experts")
"""Children of an MLP that sends tokens to experts, which needs all tokens of the batch at once."""

Checkpoints = bool | Literal["host"]
"""False: all activations are kept; True: the inputs of layers; host: these in host memory."""
Restored = Callable[[], AbstractContextManager[None]]
"""Makes a block in which a module computes as it did in its forward."""


def checkpoint_layers(backbone: PreTrainedModel, checkpoints: Checkpoints = True) -> None:
    """Prepare activation checkpointing; each layer is recomputed with the adapter and experts of its forward.

    peft's layers read the active adapter when they run. Without this, a layer that is recomputed after a
    change of role would silently use the wrong adapter. The replay mask is an argument of the layer.
    A forward serves one backward pass; a deep copy of the backbone would recompute with this one's adapters.

    Args:
        checkpoints: False does nothing.

    Raises:
        ValueError: the model has no layers that can be checkpointed.
    """
    if not checkpoints:
        return
    layers = checkpointed_layers(backbone)
    if not layers:
        raise ValueError(
            f"{type(backbone).__name__} has no layers that can be checkpointed; "
            "use roles.gradient_checkpointing=false"
        )
    adapted = lora_layers(backbone)  # found once, because it walks through the whole model

    def as_now() -> AbstractContextManager[None]:
        states, experts = adapter_states(adapted), given_experts(backbone)
        return _in_turn(
            use_states(adapted, states), replayed_experts(backbone, experts), _training(layers, is_on=True)
        )

    function = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), as_now()))
    if checkpoints == "host":
        function = partial(HostMemory().keeping, function)
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function  # type: ignore[assignment]
        for module in tokenwise_modules(layer):
            module.forward = partial(_in_tiles, _own_forward(module), layer, module, as_now)


@contextmanager
def _in_turn(*blocks: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


def checkpointed_layers(backbone: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that transformers can checkpoint, whether or not they are now."""
    return [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def checkpointing(backbone: PreTrainedModel, is_on: Checkpoints) -> Iterator[None]:
    """Checkpoint the layers if gradients are enabled, in training and evaluation mode alike."""
    layers = checkpointed_layers(backbone)
    if not is_on and any(layer.gradient_checkpointing for layer in layers):
        raise ValueError(
            "transformers' gradient checkpointing is on, which recomputes layers with whichever adapter is "
            "active in the backward pass; turn it off and use roles.gradient_checkpointing=true"
        )
    with _training(layers, bool(is_on) and torch.is_grad_enabled()):
        yield


def computing_once(layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Within this block layers keep all activations, whether or not they are prepared for checkpoints."""
    return _training(layers, is_on=False)


@contextmanager
def _training(layers: Sequence[nn.Module], is_on: bool) -> Iterator[None]:
    """Set the mode of the layers, which decides if transformers checkpoints them, but not of their parts."""
    before = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = is_on
        yield
    finally:
        for layer, was_training in zip(layers, before, strict=True):
            layer.training = was_training


class HostMemory:
    """Keeps what is saved for the backward pass in host memory, and brings it back one tensor ahead of it.

    On CUDA the copies are pinned and made by a stream of their own, beside the computation.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._latest: Callable[[], _Kept | None] = lambda: None

    def keeping(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, of which it keeps what is saved by `function` itself."""
        with saved_tensors_hooks(self._put, self._take):
            return function(*args)

    def _put(self, tensor: Tensor) -> "_Kept":
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        kept = _Kept(tensor, self._stream if tensor.is_cuda else None, self._latest)
        self._latest = weakref.ref(kept)
        return kept

    def _take(self, kept: "_Kept") -> Tensor:
        found = kept.take()
        if (before := kept.before()) is not None:  # the backward pass goes from the last layer to the first
            before.fetch()
        return found


class _Kept:
    """A tensor in host memory."""

    def __init__(
        self, tensor: Tensor, stream: torch.cuda.Stream | None, before: "Callable[[], _Kept | None]"
    ) -> None:
        self.before = before
        """The tensor kept before it, if that still exists."""
        self._device, self._stream = tensor.device, stream
        self._found: Tensor | None = None
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        with self._beside():
            self._copy.copy_(tensor, non_blocking=stream is not None)
        if stream is not None:
            tensor.record_stream(stream)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within this block, work is put on the stream of copies, after what is queued now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def fetch(self) -> None:
        """Begin to bring it back to its device."""
        if self._found is None:
            with self._beside():
                is_beside = self._stream is not None
                self._found = self._copy.to(self._device, non_blocking=is_beside, copy=True)

    def take(self) -> Tensor:
        """Return it on its device."""
        self.fetch()
        found, self._found = self._found, None
        assert found is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            found.record_stream(current)
        return found


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module as it was before it was cut into tiles."""
    forward: Any = module.forward
    return cast(Callable[..., Any], forward.args[0]) if is_tiled(module) else forward


def is_tiled(module: nn.Module) -> bool:
    """True for a module that runs in tiles while its layer is checkpointed."""
    forward: Any = module.forward
    return isinstance(forward, partial) and forward.func is _in_tiles


def tokenwise_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the MLPs and norms of a layer that map each token alone, of which a tile can be computed."""
    mlps = [
        module
        for name, module in layer.named_children()
        if name in MLP_NAMES and not any(hasattr(module, part) for part in ROUTING_NAMES)
    ]
    norms = [module for module in layer.modules() if _is_norm(module)]
    return [module for module in (*mlps, *norms) if len(signature(_own_forward(module)).parameters) == 1]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _in_tiles(
    forward: Callable[[Tensor], Tensor],
    layer: nn.Module,
    module: nn.Module,
    as_now: Restored,
    hidden: Float[Tensor, "*tokens dim"],
) -> Float[Tensor, "*tokens dim"]:
    """Return a module's output, tile by tile where its layer is checkpointed.

    A tile of an MLP begins with the norm before it, whose output is kept only for others that read it, as
    attention beside the MLP does.
    """
    if hidden.ndim == 2:  # tokens of all rows
        return _in_tiles(forward, layer, module, as_now, hidden[None])[0]
    is_short = hidden.shape[:2].numel() <= TILE
    if is_short or not (layer.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return forward(hidden)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not (trained or hidden.requires_grad):
        return forward(hidden)
    if (before := getattr(hidden, "_tiled_by", None)) is not None:
        hidden, norm, trained_before = before
        forward, trained = partial(_after, norm, forward), trained_before + trained
    # Saved before it runs: then the recomputation of a layer that saves nothing after it ends here. Each
    # module saves its own, because a checkpoint gives what it saved only once.
    saved: Tensor = _Saved.apply(hidden if hidden.requires_grad else hidden.detach().requires_grad_())  # type: ignore[no-untyped-call]
    out: Tensor = _Tiles.apply(saved, saved.grad_fn, forward, as_now(), *trained)  # type: ignore[no-untyped-call]
    if _is_norm(module):  # which is cheap to compute again
        out._tiled_by = hidden, forward, trained  # type: ignore[attr-defined]
    return out


def _after(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], tile: Tensor) -> Tensor:
    return second(first(tile))


class _Saved(torch.autograd.Function):
    """Saves its input and returns it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Tiles(torch.autograd.Function):
    """Applies a module to tiles of tokens, and again in the backward pass, to one tile at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        saved: Any,
        forward: Callable[[Tensor], Tensor],
        as_in_forward: AbstractContextManager[None],
        *trained: Tensor,
    ) -> Tensor:
        device = hidden.device.type
        ctx.saved, ctx.module, ctx.as_in_forward, ctx.trained = saved, forward, as_in_forward, trained
        # Its cache would keep casts of weights without a gradient for the forwards that follow.
        ctx.autocast = partial(
            torch.autocast,
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        with ctx.autocast():
            tiles = torch.cat([forward(tile) for tile in _tiles(hidden)], dim=1)
        return tiles.view(*hidden.shape[:2], *tiles.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved.saved_tensors
        d_tiles: list[Tensor] = []
        totals: list[Tensor | None] = [None] * len(ctx.trained)
        with ctx.as_in_forward, ctx.autocast(), torch.enable_grad():
            for tile, d_tile in zip(_tiles(hidden), _tiles(d_out), strict=True):
                leaf = tile.detach().requires_grad_()
                found = torch.autograd.grad(ctx.module(leaf), [leaf, *ctx.trained], d_tile, allow_unused=True)
                d_tiles.append(found[0])
                totals = [
                    part if total is None else total if part is None else total + part
                    for total, part in zip(totals, found[1:], strict=True)
                ]
        return torch.cat(d_tiles, dim=1).view(hidden.shape), None, None, None, *totals


def _tiles(values: Float[Tensor, "batch seq *rest"]) -> tuple[Float[Tensor, "1 token *rest"], ...]:
    return torch.split(values.reshape(1, -1, *values.shape[2:]), TILE, dim=1)
