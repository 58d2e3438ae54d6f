"""Bytes that the learner needs for a pass, beside weights, gradients and moments.

What the backward pass will read is counted on the model itself: its layers compute a few tokens, and the
tensors that they save are added up. Of attention these are queries, keys, values, output and log-sum-exp.
Bytes grow with the tokens, so two such forwards give those of any length. All else is by formula.
"""

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from lit_rlkv.kernels.backend import to_autocast_dtype, uses_triton
from lit_rlkv.kernels.shadow_attention.blocks import LONG
from lit_rlkv.kernels.token_logps.chunks import TRITON_MAX_CHUNK_LOGITS
from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS
from lit_rlkv.kvcache.state_layer import STATES
from lit_rlkv.models import activations
from lit_rlkv.models.activations import Checkpoints, checkpointed_layers, computing_once, tokenwise_modules
from lit_rlkv.models.adapters import lora_layers, use_adapter
from lit_rlkv.models.backbone import (
    forward_masks,
    has_states,
    head_dims,
    head_is_frozen,
    n_kv_heads,
    optional_setting,
    text_config,
)
from lit_rlkv.models.kv_scorer import kv_scorer_of
from lit_rlkv.models.lm_head import model_body

FEW = 64
"""Tokens of the shorter forward: as many as a chunk of recurrent layers."""
FLOAT32 = 4
BATCH_BYTES = 45
"""Bytes of a token in a batch: ids, masks, positions, log-probs, advantages."""
PRODUCTS = {"linear", "matmul", "__matmul__", "bmm", "baddbmm", "addmm", "einsum", "conv1d"}
"""Functions that autocast computes in 16 bits."""


class PassBytes:
    """Counts the bytes of passes of a model, on any device: on `meta`, too, where nothing is computed.

    Weights that train, and the precision, are those of now; of several adapters one is active.

    Args:
        model: with our attention.
        is_fused: True if passes will run in the Triton kernels; None: if they do on the model's device.
        autocast: dtype of products on the meta device, which has no autocast; None: that of now.
    """

    def __init__(
        self, model: PreTrainedModel, *, is_fused: bool | None = None, autocast: torch.dtype | None = None
    ) -> None:
        self.model, self.config = model, text_config(model)
        on_device = torch.empty(0, dtype=torch.float32, device=model.device)
        self.is_fused = uses_triton(on_device) if is_fused is None else is_fused
        short, long = (_Count(model, n_tokens, autocast) for n_tokens in (FEW, 2 * FEW))
        self.itemsize = long.itemsize
        self._of_token = (long.sums - short.sums) / FEW
        self._fixed = short.sums - FEW * self._of_token
        self._trained = max(map(_trained_bytes, checkpointed_layers(model)), default=0)
        self._head_is_frozen = head_is_frozen(model)
        self.state_bytes = _state_bytes(model) if has_states(model) else 0
        """Bytes of the states of recurrent layers for each row that is decoded."""

    def of_pass(self, n_rows: int, n_columns: int, checkpoints: Checkpoints) -> dict[str, int]:
        """Return the bytes by what they are for, of rows of so many tokens; with `host` those of the device.

        `kept` is there for the whole backward pass, `backward` at its peak.
        """
        n = n_rows * n_columns
        whole, inputs, layer, in_tiles, outside, widest = (
            (self._fixed + n * self._of_token).clamp(min=0).tolist()
        )
        config, dim = self.config, self.itemsize * int(self.config.hidden_size)
        n_layers = int(config.num_hidden_layers)
        queries, keys = (
            self.itemsize * heads * max(head_dims(self.model))
            for heads in (int(config.num_attention_heads), n_kv_heads(self.model))
        )
        of_layer = 2 * (widest / n + dim)  # gradients of an MLP's widest activations
        kept, backward = whole + n_layers * self._of_weights(n_rows, n_columns), n * of_layer
        if checkpoints:
            n_kept = min(n_layers, 2) if checkpoints == "host" else n_layers
            kept = inputs * n_kept / n_layers + self._of_scorer(n)
            # Of an MLP, in tiles beside what is around it; or of attention, of which keys' are in float32.
            around = 3 * n * dim if n > activations.TILE else 0
            of_mlp = around + min(n, activations.TILE) * (in_tiles / n + of_layer)
            of_attention = n * (dim + 2 * queries + 2 * FLOAT32 * keys / self.itemsize)
            backward = layer - inputs / n_layers + self._of_weights(n_rows, n_columns)
            backward += max(of_mlp, of_attention)
            if n > activations.TILE:  # gradients of their weights are summed up
                backward += 2 * self._trained
        # Before the layers: log-probs of the last hidden states, then the last norm in float32.
        last = max(outside + 2 * n * dim + self._of_logits(n), 6 * FLOAT32 * n * dim / self.itemsize)
        parts = {"kept": kept, "backward": max(backward, last), "batch": n * BATCH_BYTES}
        return {name: int(n_bytes) for name, n_bytes in parts.items()}

    def _of_logits(self, n: int) -> int:
        """Two chunks of float32 logits, on a CPU three; of a head that trains a gradient."""
        n_logits = n * int(self.config.vocab_size)
        most = TRITON_MAX_CHUNK_LOGITS if self.is_fused else MAX_CHUNK_LOGITS
        chunks = (2 if self.is_fused else 3) * min(n_logits, most)
        n_trained = 0 if self._head_is_frozen else int(self.config.vocab_size * self.config.hidden_size)
        return FLOAT32 * chunks + self.itemsize * n_trained

    def _of_weights(self, n_rows: int, n_columns: int) -> int:
        """Bytes that plain torch keeps of attention in short rows: masks, and with a soft cap the weights."""
        if self.is_fused or n_columns >= LONG:
            return 0
        n_bytes = self.itemsize if optional_setting(self.config, "attn_logit_softcapping") is None else 10
        return n_bytes * n_rows * int(self.config.num_attention_heads) * n_columns**2

    def _of_scorer(self, n: int) -> int:
        """Keys and values of all layers, which a trained scorer of evictions keeps."""
        scorer = kv_scorer_of(self.model)
        if scorer is None or not any(parameter.requires_grad for parameter in scorer.parameters()):
            return 0
        n_elements = int(self.config.num_hidden_layers) * n_kv_heads(self.model) * max(head_dims(self.model))
        return 2 * self.itemsize * n * n_elements


class _Count:
    """The bytes that the forward of a row of so many tokens saves.

    Attributes:
        sums: bytes of all layers, of their inputs, of the largest layer without what tiles would compute
            again, of that alone, of what is outside of layers, and of the largest tensor of a layer.
    """

    def __init__(self, model: PreTrainedModel, n_tokens: int, autocast: torch.dtype | None) -> None:
        self._inputs: dict[int, int] = {}
        self._saved: dict[int, tuple[int, bool, Tensor]] = {}
        """By storage: layer, or -1 outside of layers; True if within tiles alone; the tensor."""
        self._of_tiles: dict[int, tuple[int, Tensor]] = {}
        """Inputs of what runs in tiles, by storage: layer and tensor."""
        self._layer, self._n_tiles = -1, 0
        self._of_norm: Tensor | None = None
        """Output of the latest norm, of which an MLP in tiles keeps nothing."""
        self._output: Any = None
        """Output of the latest layer."""
        weights = (t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, DTensor))
        self._weights = {_storage(tensor) for tensor in weights}
        ids = torch.zeros(1, n_tokens, dtype=torch.long, device=model.device)
        masks = forward_masks(model, torch.ones_like(ids, dtype=torch.bool), model.device)
        layers, adapted = checkpointed_layers(model), lora_layers(model)
        adapter = next((name for layer in adapted for name in layer.lora_A), None)
        times = _times(layers)
        with ExitStack() as stack:
            for number, layer in enumerate(layers):
                if times[number] == 0:
                    layer.forward = self._skip_layer
                    stack.callback(vars(layer).pop, "forward")
                    continue
                enter = partial(self._enter_layer, number)
                stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._leave_layer).remove)
                for module in tokenwise_modules(layer):
                    stack.callback(module.register_forward_pre_hook(self._enter_tiles).remove)
                    stack.callback(module.register_forward_hook(self._leave_tiles).remove)
            stack.enter_context(use_adapter(adapted, adapter))
            stack.enter_context(computing_once(layers))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            if autocast is not None:
                stack.enter_context(_Autocast(autocast))
            hidden = model_body(model)(
                input_ids=ids,
                position_ids=torch.arange(n_tokens, device=model.device)[None],
                use_cache=False,
                replay=_Attention(autocast),
                attention_mask=masks,
            ).last_hidden_state
        self.itemsize: int = hidden.dtype.itemsize
        beside, in_tiles = ([0] * (len(layers) + 1) for _ in range(2))
        whole = widest = 0
        for number, is_in_tiles, tensor in self._saved.values():
            n_bytes = tensor.untyped_storage().nbytes()
            (in_tiles if is_in_tiles else beside)[number] += n_bytes
            if number >= 0:
                whole, widest = whole + n_bytes * times[number], max(widest, n_bytes)
        for place, (number, tensor) in self._of_tiles.items():
            n_bytes = tensor.untyped_storage().nbytes()
            if place not in self._saved:
                beside[number] += n_bytes
            elif self._saved[place][1]:
                beside[number], in_tiles[number] = beside[number] + n_bytes, in_tiles[number] - n_bytes
        outside = beside.pop() + in_tiles.pop()
        largest, tiles = max(beside, default=0), max(in_tiles, default=0)
        inputs = sum(n_bytes * times[number] for number, n_bytes in self._inputs.items())
        self.sums = torch.tensor([whole, inputs, largest, tiles, outside, widest], dtype=torch.float64)
        del self._saved, self._of_tiles

    def _save(self, tensor: Tensor) -> Tensor:
        place = _storage(tensor)
        if place not in self._weights:
            number, is_in_tiles, _ = self._saved.get(place, (self._layer, True, tensor))
            self._saved[place] = number, is_in_tiles and self._n_tiles > 0, tensor
        return tensor

    def _enter_layer(
        self, number: int, layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Any]
    ) -> None:
        self._layer = number
        self._weights |= {_storage(tensor) for tensor in layer.parameters()}  # gathered, of sharded layers
        hidden: Tensor = args[0] if args else named["hidden_states"]
        self._inputs[number] = hidden.untyped_storage().nbytes()

    def _leave_layer(self, layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        self._layer, self._output = -1, output

    def _skip_layer(self, *args: Tensor, **named: Any) -> Any:
        """Pass the hidden states on, as a layer like the latest one returns them."""
        hidden = args[0] if args else named["hidden_states"]
        return hidden if isinstance(self._output, Tensor) else (hidden, *self._output[1:])

    def _enter_tiles(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._n_tiles == 0 and args[0] is not self._of_norm and args[0].requires_grad:
            self._of_tiles[_storage(args[0])] = self._layer, args[0]
        self._n_tiles += 1

    def _leave_tiles(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._n_tiles -= 1
        self._of_norm = output


class _Autocast(TorchFunctionMode):
    """Takes the factors of products to a dtype, as autocast does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in PRODUCTS:
            args = [self._cast(value) for value in args]
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_number else value


class _Attention:
    """Stands in for `Replay`: saves what attention saves, and computes nothing."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        self.autocast = autocast

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        if self.autocast is not None:
            query, key, value = (tensor.to(self.autocast) for tensor in (query, key, value))
        elif not query.is_meta:
            query, key, value = to_autocast_dtype(query, key, value)
        out: Tensor = _Attended.apply(query, key, value)  # type: ignore[no-untyped-call]
        return out


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[:3], dtype=torch.float32))
        return out


def _times(layers: Sequence[nn.Module]) -> list[int]:
    """Return how many layers each one's bytes count for; those of 0 layers are not computed.

    On the meta device, of layers with the same weights the second stands for those after it; what all share,
    such as rotary embeddings, is saved by the first.
    """
    alike: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        weights = tuple((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
        is_meta = any(p.is_meta for p in layer.parameters())
        alike.setdefault((type(layer), weights) if is_meta else number, []).append(number)
    times = [0] * len(layers)
    for first, *others in alike.values():
        times[first] = 1
        times[others[0] if others else first] = len(others) or 1
    return times


@torch.no_grad()
def _state_bytes(model: PreTrainedModel) -> int:
    cache = DynamicCache(config=text_config(model))
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model_body(model)(input_ids=ids, past_key_values=cache, use_cache=True)
    states = [each for layer in cache.layers for name in STATES for each in getattr(layer, name, {}).values()]
    return sum(state.nbytes for state in states if state is not None)


def _trained_bytes(layer: nn.Module) -> int:
    """Bytes of what trains in modules that run in tiles."""
    parameters = {p for module in tokenwise_modules(layer) for p in module.parameters() if p.requires_grad}
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
