"""Layouts: the weights that each role uses, in the five variants of Hydra-RLHF."""

from collections.abc import Mapping
from dataclasses import dataclass

ROLES = ("policy", "reference", "reward", "value")
TRAINED = ("policy", "value")
CRITICS = ("reward", "value")
"""Roles with a scalar head; a separately trained reward model is their backbone."""


@dataclass(frozen=True)
class Layout:
    """Backbone and adapter of each role."""

    backbone: Mapping[str, str]
    adapter: Mapping[str, str | None]
    """None means no adapter; a layout without adapters trains whole backbones."""

    @property
    def trains_backbones(self) -> bool:
        """True if the policy trains its whole backbone instead of an adapter."""
        return self.adapter["policy"] is None

    @property
    def shares_critic(self) -> bool:
        """True if policy and critics share a backbone, and must therefore start from the same weights."""
        return self.backbone["policy"] == self.backbone["reward"]


_NO_ADAPTER = dict.fromkeys(ROLES)
_TWO_ADAPTERS = _NO_ADAPTER | {"policy": "policy", "value": "value"}
_SEPARATE = {role: role for role in ROLES}
_SHARED = dict.fromkeys(ROLES, "shared")
LAYOUTS = {
    "ppo": Layout(_SEPARATE, _NO_ADAPTER),
    "lora_ppo": Layout(_SEPARATE, _TWO_ADAPTERS),
    "dynamic_lora": Layout(
        {"policy": "actor", "reference": "actor", "reward": "critic", "value": "critic"}, _TWO_ADAPTERS
    ),
    "j_hydra": Layout(_SHARED, _NO_ADAPTER | {"policy": "joint", "value": "joint"}),
    "hydra": Layout(_SHARED, _TWO_ADAPTERS),
}
"""The five variants of Hydra-RLHF (arXiv:2309.00754, Table 2)."""
