"""LoRA adapters on a backbone: injected by peft, switched here."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.models.rounding import Cast


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of the trained roles (arXiv:2106.09685)."""

    rank: int
    alpha: int
    target_modules: Sequence[str] | str
    """Module names, or "all-linear"."""


def check_target_modules(backbone: PreTrainedModel, targets: Sequence[str] | str) -> None:
    """Refuse names under which nothing lies that could have an adapter, before there is one.

    Raises:
        ValueError: naming them, and those that there are.
    """
    if targets == "all-linear":
        return
    matrices = [name for name, module in backbone.named_modules() if _is_matrix(module)]
    if isinstance(targets, str):  # to peft a text is a regular expression of whole names
        try:
            unknown = [] if any(re.fullmatch(targets, name) for name in matrices) else [targets]
        except re.error as error:
            raise ValueError(
                f"target_modules={targets!r} is no regular expression: {error}; mend it"
            ) from error
    else:
        unknown = [one for one in targets if not any(f".{name}".endswith(f".{one}") for name in matrices)]
    if unknown:
        there = dict.fromkeys(name.rpartition(".")[2] for name in matrices)
        raise ValueError(
            f"target_modules: nothing in this model is called {', '.join(unknown)}; choose from "
            f"{', '.join(there)}, or all-linear"
        )


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim > 1


def add_adapter(backbone: PreTrainedModel, name: str, lora: LoraSpec) -> None:
    """Inject one more LoRA adapter, switched off; with B = 0 it changes nothing yet.

    It is kept in float32 or better, and computes in the backbone's precision: in bfloat16 an update of 1e-5
    would be lost on every weight above 0.004, where half a step is 1.5e-5.

    Raises:
        ValueError: `target_modules` name no module of this backbone, or the output head.
    """
    # A second adapter goes where the first one went: "all-linear" would find the first one's own matrices.
    present = [name for name, module in backbone.named_modules() if isinstance(module, LoraLayer)]
    given = lora.target_modules
    targets = present or (given if isinstance(given, str) else list(given))
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
    with warnings.catch_warnings():
        # Several adapters on one backbone are what this is for.
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # of GPT-2, and then set right
        inject_adapter_in_model(config, backbone, adapter_name=name)
    if isinstance(backbone.get_output_embeddings(), LoraLayer):
        raise ValueError(
            f"target_modules={given!r} put an adapter on the output head, which all roles share; leave it out"
        )
    for layer in lora_layers(backbone):
        layer._disable_adapters = True
    for parameter_name, parameter in backbone.named_parameters():
        if "lora_" in parameter_name:  # injecting one adapter freezes the others
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_(True)
    if backbone.dtype.itemsize < torch.float32.itemsize:
        for layer in lora_layers(backbone):
            pair = [matrices for matrices in (layer.lora_A, layer.lora_B) if name in matrices]
            if all(type(matrices[name]) is nn.Linear for matrices in pair):
                # peft would have each adapter keep a copy in float32 of what it reads.
                layer.cast_input_dtype_enabled = False
                for matrices in pair:
                    matrices[name] = Cast(matrices[name], layer.get_base_layer())


def lora_layers(backbone: PreTrainedModel) -> list[LoraLayer]:
    """Layers that hold adapters, on or off; none before the first adapter is added.

    It walks through the whole model: what asks often keeps the list, which more adapters do not change.
    """
    return [module for module in backbone.modules() if isinstance(module, LoraLayer)]


def active_adapter(layers: Sequence[LoraLayer]) -> str | None:
    """The adapter that is on now in the layers of a backbone, None if all are off."""
    return None if not layers or layers[0]._disable_adapters else layers[0].active_adapters[0]


@contextmanager
def switched(layers: Sequence[LoraLayer], adapter: str | None) -> Iterator[None]:
    """One adapter on in the layers of a backbone, or all off; what was on before is restored."""
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    try:
        # peft's own switches also flip requires_grad, which a role must not change.
        for layer in layers:
            layer._disable_adapters = adapter is None
            layer._active_adapter = [adapter] if adapter is not None else layer._active_adapter
        yield
    finally:
        for layer, (was_off, was_active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = was_off, was_active


@contextmanager
def acting_by_row(backbone: PreTrainedModel, adapters: Sequence[str | None]) -> Iterator[None]:
    """One adapter for each row of the batch (None: off), so that several roles share one forward.

    Without gradients only. Raises ValueError (peft's) from a layer that mixes up the rows of a batch.
    """
    names = ["__base__" if adapter is None else adapter for adapter in adapters]

    def route(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"adapter_names": names}

    layers = lora_layers(backbone)
    with ExitStack() as stack:
        stack.enter_context(switched(layers, next(a for a in adapters if a is not None)))
        for layer in layers:
            stack.enter_context(cast(nn.Module, layer).register_forward_pre_hook(route, with_kwargs=True))
        yield
