"""Roles: policy, reference, reward model and critic on one backbone or several, by layout."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.models.activations import Checkpoints, checkpoint_layers, checkpointing
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.models.backbone import text_config
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.kv_scorer import KV_SCORER
from lit_rlkv.models.layouts import LAYOUTS, ROLES, TRAINED


class Roles(nn.Module):
    """The backbones and heads of a layout that the roles in `needed` use.

    Adapters start at zero and the value head at `value_head`, so every trained role first computes the same
    as its backbone. Outside `acting_as` all adapters are disabled.

    Args:
        load: returns a new prepared backbone for a role; called once for each backbone of the layout.
        reward_head: trained weights of a `ScalarHead`; required for the reward role.
        value_head: initial weights of the value head; None starts at zero.
        checkpoints_layers: keep only the inputs of layers for the backward pass, with `host` in host memory,
            and recompute the rest.

    Raises:
        ValueError: the layout or a role is unknown, the adapters match no module, or the reward role has no
            head.
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
        checkpoints_layers: Checkpoints = False,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        self.layout = LAYOUTS[layout]
        self.needed = tuple(role for role in ROLES if role in {"policy", *needed})
        if "reward" in self.needed and reward_head is None:
            raise ValueError(
                "the reward role needs a trained reward head, and this checkpoint has none; run the SFT "
                "stage with preference pairs, or use the verifier as the reward"
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
        self.reference_is_synced = False
        """True once the reference is no longer the starting model."""
        self.keep_for_backward(checkpoints_layers)

    def keep_for_backward(self, checkpoints: Checkpoints) -> None:
        """Set what the layers of all backbones keep for the backward pass; see `checkpoints_layers`."""
        self.checkpoints_layers = checkpoints
        for name in self.backbones:
            checkpoint_layers(self.named_backbone(name), checkpoints)

    def backbone(self, role: str) -> PreTrainedModel:
        """Return the backbone of a role; its adapters are not changed.

        Raises:
            ValueError: the role is unknown or was not in `needed`.
        """
        if role not in self.needed:
            known = f"unknown role {role!r}" if role not in ROLES else f"role {role!r} was not built"
            raise ValueError(f"{known}; choose one of {', '.join(self.needed)}")
        return self.named_backbone(self.layout.backbone[role])

    def named_backbone(self, name: str) -> PreTrainedModel:
        """Return a backbone by its name in the layout."""
        return cast(PreTrainedModel, self.backbones[name])

    def head(self, role: str) -> ScalarHead:
        """Return the scalar head of the reward or value role."""
        return cast(ScalarHead, self.heads[role])

    def trained_parameters(self, role: str) -> list[nn.Parameter]:
        """Return the parameters that a role trains; in a joint layout policy and critic share an adapter."""
        adapter = self.layout.adapter[role]
        own = [
            parameter
            for name, parameter in self.backbone(role).named_parameters()
            if parameter.requires_grad and _is_trained_by(role, adapter, name)
        ]
        return own + (list(self.heads[role].parameters()) if role in self.heads else [])

    def _add_adapters(self, lora: LoraSpec) -> None:
        for name in self.backbones:
            backbone = self.named_backbone(name)
            roles = [r for r in self.needed if r in TRAINED and self.layout.backbone[r] == name]
            adapters = dict.fromkeys(a for r in roles if (a := self.layout.adapter[r]) is not None)
            backbone.requires_grad_(self.layout.trains_backbones and bool(roles))
            # A critic does not use the LM head, unless the head is tied to the input embedding.
            head = backbone.get_output_embeddings()
            if roles == ["value"] and head.weight is not backbone.get_input_embeddings().weight:
                head.requires_grad_(False)
            for adapter in adapters:
                add_adapter(backbone, adapter, lora)


def _is_trained_by(role: str, adapter: str | None, name: str) -> bool:
    """True if a role trains the parameter of this name: its adapter's, and as the policy the kv_scorer's."""
    if name.startswith(f"{KV_SCORER}."):
        return role == "policy"
    return adapter is None or f".{adapter}." in name


def make_head(backbone: PreTrainedModel, start: Mapping[str, Tensor] | None) -> ScalarHead:
    """Return a scalar head for this backbone, with the given weights or at zero.

    Raises:
        ValueError: the weights have another hidden size.
    """
    head = ScalarHead(text_config(backbone).hidden_size)
    if start is not None:
        try:
            head.load_state_dict(dict(start))
        except RuntimeError as error:
            raise ValueError(
                f"the reward head does not fit a {type(backbone).__name__} with hidden size "
                f"{head.linear.in_features}; use the head of the same checkpoint: {error}"
            ) from error
    return head.to(device=backbone.device, dtype=torch.promote_types(backbone.dtype, torch.float32))


@contextmanager
def acting_as(roles: Roles, role: str) -> Iterator[PreTrainedModel]:
    """Activate the adapter of a role within a `with` block, and yield the role's backbone.

    The previous role is restored at the end, also after an error. Blocks can be nested. `requires_grad` does
    not change. Checkpointed layers are recomputed with the role of their forward.

    Raises:
        ValueError: the role is unknown, or transformers' own checkpointing is on.
    """
    backbone = roles.backbone(role)
    adapter = use_adapter(lora_layers(backbone), roles.layout.adapter[role])
    with adapter, checkpointing(backbone, roles.checkpoints_layers):
        yield backbone
