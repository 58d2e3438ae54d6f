"""LoRA adapters on a backbone: injection with peft, activation, precision."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.models.cast_linear import CastLinear

# peft and TRL use names that transformers has replaced, which nobody here can change.
warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing", FutureWarning)


@dataclass(frozen=True)
class LoraSpec:
    """Configuration of the trained roles' adapters (arXiv:2106.09685)."""

    rank: int
    alpha: int
    target_modules: Sequence[str] | str
    """Module names, or "all-linear"."""


def check_target_modules(backbone: PreTrainedModel, targets: Sequence[str] | str) -> None:
    """Check that every target module exists and can have an adapter.

    Raises:
        ValueError: there is none, or one matches no module with a weight matrix, the output head, or
            embeddings that are also the head, or it is an invalid regular expression.
    """
    if not targets:
        raise ValueError(f"target_modules must name a module, got {targets!r}; all-linear is each of them")
    if targets == "all-linear":
        return
    matrices = {name: module for name, module in backbone.named_modules() if _is_matrix(module)}
    if isinstance(targets, str):  # peft takes a string as a regular expression for full names
        try:
            matches = {targets: [name for name in matrices if re.fullmatch(targets, name)]}
        except re.error as error:
            raise ValueError(
                f"target_modules must be a regular expression, got {targets!r} ({error}); correct it"
            ) from error
    else:
        matches = {t: [name for name in matrices if f".{name}".endswith(f".{t}")] for t in targets}
    head = backbone.get_output_embeddings()
    for target, names in matches.items():
        # Tied embeddings are the head's weights: one of the two would have the adapter, and no merge exists.
        if any(matrices[name].weight is head.weight for name in names):
            raise ValueError(
                f"target_modules must not include the shared output head, nor embeddings tied to it, got "
                f"{target!r}; leave it out"
            )
    unknown = [target for target, names in matches.items() if not names]
    if unknown:
        known = dict.fromkeys(name.rpartition(".")[2] for name in matrices)
        raise ValueError(
            f"target_modules: this model has no module {', '.join(unknown)}; choose from "
            f"{', '.join(known)}, or all-linear"
        )


def without_adapter(backbone: nn.Module) -> list[str]:
    """Return the full names of the linear modules that an adapter cannot wrap."""
    modules = list(backbone.named_modules())
    fused = [  # the kernels of Mamba read these weights by themselves, and would leave an adapter out
        f"{name}.{part}"
        for name, module in modules
        if hasattr(module, "A_log") and hasattr(module, "D")
        for part in ("out_proj", "conv1d")
        if hasattr(module, part)
    ]
    # A router that is a linear module itself, as Llama 4's, returns more than its product.
    routers = [name for name, module in modules if isinstance(module, nn.Linear) and hasattr(module, "top_k")]
    return fused + routers


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim > 1


def add_adapter(backbone: PreTrainedModel, name: str, lora: LoraSpec) -> None:
    """Inject another LoRA adapter, disabled; with B = 0 it changes no output.

    Its weights are kept in float32 or higher, and it computes in the backbone's precision. In bfloat16 an
    update of 1e-5 would be lost on every weight above 0.004, where half a rounding step is 1.5e-5.

    Raises:
        ValueError: see `check_target_modules`.
    """
    # A second adapter has the targets of the first: "all-linear" would match the first adapter's matrices.
    present = [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    ]
    first = next(iter(vars(backbone).get("peft_config", {}).values()), None)
    given = lora.target_modules
    if first is None:
        check_target_modules(backbone, given)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=present or (given if isinstance(given, str) else list(given)),
        exclude_modules=without_adapter(backbone) if given == "all-linear" else None,
        # Of a mixture of experts, where peft turns its targets into parameters of routers and experts.
        target_parameters=None if first is None else first.target_parameters,
        lora_dropout=0.0,
    )
    with warnings.catch_warnings():
        # Several adapters on one backbone are intended.
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # for GPT-2; peft then corrects it
        inject_adapter_in_model(config, backbone, adapter_name=name)
    for layer in lora_layers(backbone):
        layer._disable_adapters = True
    for parameter_name, parameter in backbone.named_parameters():
        if "lora_" in parameter_name:  # injecting one adapter freezes the others
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_(True)
    if backbone.dtype.itemsize < torch.float32.itemsize:
        for layer in lora_layers(backbone):
            pair = [matrices for matrices in (layer.lora_A, layer.lora_B) if name in matrices]
            # The adapter of a parameter casts its product itself.
            if not isinstance(layer, ParamWrapper) and all(
                type(matrices[name]) is nn.Linear for matrices in pair
            ):
                # Otherwise peft stores a float32 copy of each adapter's input.
                layer.cast_input_dtype_enabled = False
                for matrices in pair:
                    matrices[name] = CastLinear(matrices[name], layer.get_base_layer())


def lora_layers(backbone: PreTrainedModel) -> list[LoraLayer]:
    """Return the layers with adapters, active or not; none before the first adapter is added.

    This walks through the whole model. Callers may keep the list: adding adapters does not change it.
    """
    return [module for module in backbone.modules() if isinstance(module, LoraLayer)]


State = tuple[bool, Any]
"""A layer's adapters as peft keeps them: True if all are disabled, and the names of the active ones."""


def adapter_states(layers: Sequence[LoraLayer]) -> list[State]:
    """Return which adapters are active in each layer, for `use_states`."""
    return [(layer._disable_adapters, layer._active_adapter) for layer in layers]


@contextmanager
def use_states(layers: Sequence[LoraLayer], states: Sequence[State]) -> Iterator[None]:
    """Activate in each layer what was active before, within a `with` block; then restore what is active now.

    peft's set_adapter also changes requires_grad, which a role must not.
    """
    before = adapter_states(layers)
    try:
        _set_states(layers, states)
        yield
    finally:
        _set_states(layers, before)


def _set_states(layers: Sequence[LoraLayer], states: Sequence[State]) -> None:
    for layer, (is_off, active) in zip(layers, states, strict=True):
        layer._disable_adapters, layer._active_adapter = is_off, active


def active_adapter(layers: Sequence[LoraLayer]) -> str | None:
    """Return the name of the active adapter; None if all are disabled."""
    return None if not layers or layers[0]._disable_adapters else layers[0].active_adapters[0]


def use_adapter(layers: Sequence[LoraLayer], adapter: str | None) -> AbstractContextManager[None]:
    """Activate one adapter within a `with` block, or disable all (None); then restore the previous one."""
    active = [layer._active_adapter if adapter is None else [adapter] for layer in layers]
    return use_states(layers, [(adapter is None, names) for names in active])
