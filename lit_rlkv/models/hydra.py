"""Roles on one backbone: which LoRA adapter is on while the same weights are read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

ADAPTER_OF_ROLE: dict[str, str | None] = {"reference": None, "reward": None, "policy": "policy"}


def add_policy_adapter(
    backbone: PreTrainedModel, *, rank: int, alpha: int, target_modules: Sequence[str] | str
) -> PreTrainedModel:
    """Freeze the backbone and inject the policy's LoRA; with B = 0 the policy starts as the reference.

    Raises:
        ValueError: `target_modules` name no module of this backbone.
    """
    backbone.requires_grad_(False)
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    inject_adapter_in_model(config, backbone, adapter_name="policy")
    if isinstance(backbone.get_output_embeddings(), BaseTunerLayer):
        raise ValueError(
            f"target_modules={targets!r} put an adapter on the output head, which all roles share; "
            "leave it out"
        )
    return backbone


@contextmanager
def acting_as(backbone: PreTrainedModel, role: str) -> Iterator[PreTrainedModel]:
    """Run the backbone in one role; the role before it is restored on leaving, also after an error.

    Forward and backward of a role belong inside one such block. Which parameters train is not changed.
    """
    if role not in ADAPTER_OF_ROLE:
        raise ValueError(f"unknown role {role!r}; choose one of {', '.join(ADAPTER_OF_ROLE)}")
    is_off = ADAPTER_OF_ROLE[role] is None
    layers = [module for module in backbone.modules() if isinstance(module, BaseTunerLayer)]
    if not layers and not is_off:
        raise ValueError(f"role {role!r} needs its adapter; call add_policy_adapter on the backbone first")
    before = [layer._disable_adapters for layer in layers]
    try:
        # peft's own switch, enable_adapters, also flips requires_grad, which a role must not change.
        for layer in layers:
            layer._disable_adapters = is_off
        yield backbone
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off
