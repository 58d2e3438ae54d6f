"""Policy, reference, reward model and critic on one backbone, or on several where a layout asks for them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_rlkv.models.adapters import LoraSpec, active_adapter, add_adapter, lora_layers, switched
from lit_rlkv.models.backbone import text_config
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.layouts import LAYOUTS, ROLES, TRAINED


class Roles(nn.Module):
    """The backbones and heads of a layout, as far as the roles in `needed` ask for them.

    Adapters start at zero and the value head at `value_head`, so at first every trained role computes what
    its backbone does. Outside of `acting_as` all adapters are off.

    Args:
        load: a prepared backbone of its own for a role; called once for each backbone of the layout.
        reward_head: trained weights of a `ScalarHead`; needed for the reward role.
        value_head: weights that the value head starts from; None starts at zero.
        checkpoints_layers: keep only layer inputs for the backward pass and recompute the rest.

    Raises:
        ValueError: an unknown layout or role, adapters that fit nowhere, a reward role without a head.
    """

    def __init__(
        self,
        layout: str,
        load: Callable[[str], PreTrainedModel],
        *,
        lora: LoraSpec,
        needed: Collection[str] = ("policy", "reference"),
        reward_head: Mapping[str, Tensor] | None = None,
        value_head: Mapping[str, Tensor] | None = None,
        checkpoints_layers: bool = False,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        self.layout = LAYOUTS[layout]
        self.needed = tuple(role for role in ROLES if role in {"policy", *needed})
        if "reward" in self.needed and reward_head is None:
            raise ValueError(
                "the reward role needs a trained reward head, and this checkpoint has none; run the SFT "
                "stage with preference pairs, or take the verifier as the reward"
            )
        self.backbones = nn.ModuleDict()
        for role in self.needed:
            if self.layout.backbone[role] not in self.backbones:
                self.backbones[self.layout.backbone[role]] = load(role)
        self._add_adapters(lora)
        self.heads = nn.ModuleDict()
        for role, start in (("reward", reward_head), ("value", value_head)):
            if role in self.needed:
                self.heads[role] = make_head(self.backbone(role), start).requires_grad_(role in TRAINED)
        self.checkpoints_layers = checkpoints_layers
        if checkpoints_layers:
            for name in self.backbones:
                self._checkpoint_layers(name)

    def backbone(self, role: str) -> PreTrainedModel:
        """The backbone that a role reads, without switching anything.

        Raises:
            ValueError: the role is unknown, or was not asked for when these were built.
        """
        if role not in self.needed:
            known = f"unknown role {role!r}" if role not in ROLES else f"role {role!r} was not built"
            raise ValueError(f"{known}; choose one of {', '.join(self.needed)}")
        return self.named_backbone(self.layout.backbone[role])

    def named_backbone(self, name: str) -> PreTrainedModel:
        """A backbone by its name in the layout."""
        return cast(PreTrainedModel, self.backbones[name])

    def head(self, role: str) -> ScalarHead:
        """The scalar head of the reward or value role."""
        return cast(ScalarHead, self.heads[role])

    def trained_parameters(self, role: str) -> list[nn.Parameter]:
        """Return the parameters that a role trains; in a joint layout policy and critic share an adapter."""
        adapter = self.layout.adapter[role]
        own = [
            parameter
            for name, parameter in self.backbone(role).named_parameters()
            if parameter.requires_grad and (adapter is None or f".{adapter}." in name)
        ]
        return own + (list(self.heads[role].parameters()) if role in self.heads else [])

    def _add_adapters(self, lora: LoraSpec) -> None:
        for name in self.backbones:
            backbone = self.named_backbone(name)
            roles = [r for r in self.needed if r in TRAINED and self.layout.backbone[r] == name]
            adapters = dict.fromkeys(a for r in roles if (a := self.layout.adapter[r]) is not None)
            backbone.requires_grad_(self.layout.trains_backbones and bool(roles))
            if roles == ["value"]:
                freeze_output_head(backbone)
            for adapter in adapters:
                add_adapter(backbone, adapter, lora)

    def _checkpoint_layers(self, name: str) -> None:
        """Checkpoint the layers of a backbone, each recomputed in the role of its first forward.

        peft's layers read their adapter when they run, so without this a layer that is recomputed after a
        switch would silently use the other role's. The shadow mask is an argument of the layer, and so bound.
        """
        backbone = self.named_backbone(name)
        layers = checkpointed_layers(backbone)
        if not layers:
            raise ValueError(
                f"{type(backbone).__name__} has no layers that can be checkpointed; "
                "use roles.gradient_checkpointing=false"
            )

        adapted = lora_layers(backbone)  # asked for once, and not by every layer of every forward

        def in_first_role() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), switched(adapted, active_adapter(adapted))

        function = partial(checkpoint, use_reentrant=False, context_fn=in_first_role)
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = function  # type: ignore[assignment]


def make_head(backbone: PreTrainedModel, start: Mapping[str, Tensor] | None) -> ScalarHead:
    """A scalar head for this backbone with the weights given, or at zero.

    Raises:
        ValueError: the weights are of a head for another hidden size.
    """
    head = ScalarHead(text_config(backbone).hidden_size)
    if start is not None:
        try:
            head.load_state_dict(dict(start))
        except RuntimeError as error:
            raise ValueError(
                f"the reward head does not fit a {type(backbone).__name__} with hidden size "
                f"{head.linear.in_features}; it belongs to another checkpoint: {error}"
            ) from error
    return head.to(device=backbone.device, dtype=torch.promote_types(backbone.dtype, torch.float32))


def freeze_output_head(backbone: PreTrainedModel) -> None:
    """A critic reads no logits; an LM head that is not also the input embedding has nothing to learn."""
    head = backbone.get_output_embeddings()
    if head.weight is not backbone.get_input_embeddings().weight:
        head.requires_grad_(False)


def checkpointed_layers(backbone: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Layers that transformers can checkpoint, whether or not they are now."""
    return [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def acting_as(roles: Roles, role: str) -> Iterator[PreTrainedModel]:
    """The backbone of a role with that role's adapter on; the role before is restored, also after an error.

    Blocks nest. Which parameters train is not changed. Layers that are recomputed later for the backward pass
    use the role of this forward, whatever role is active then.

    Raises:
        ValueError: an unknown role, or layers checkpointed in a way that forgets the role.
    """
    backbone = roles.backbone(role)
    with ExitStack() as stack:
        stack.enter_context(switched(lora_layers(backbone), roles.layout.adapter[role]))
        stack.enter_context(_recomputing(backbone, roles.checkpoints_layers))
        yield backbone


@contextmanager
def _recomputing(backbone: PreTrainedModel, is_ours: bool) -> Iterator[None]:
    """Checkpoint the layers while gradients flow, and never while sampling, whatever mode the model is in."""
    layers = checkpointed_layers(backbone)
    if not is_ours and any(layer.gradient_checkpointing for layer in layers):
        raise ValueError(
            "this backbone checkpoints its layers in transformers' own way, which recomputes them in "
            "whatever role is active then; turn that off and use roles.gradient_checkpointing=true"
        )
    before = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = is_ours and torch.is_grad_enabled()
        yield
    finally:
        for layer, was_training in zip(layers, before, strict=True):
            layer.training = was_training
