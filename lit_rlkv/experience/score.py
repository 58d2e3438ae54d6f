"""Score a rollout with every role, in as few forwards as possible."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.config.schema import RolesConfig
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.adapters import lora_layers, use_adapter
from lit_rlkv.models.backbone import check_length
from lit_rlkv.models.heads import last_token
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.learner import learner_states
from lit_rlkv.models.packing import TOKENS_PER_PASS, passes, unpacked
from lit_rlkv.models.replay import (
    prompt_columns,
    response_logps,
    response_logps_and_entropy,
    scatter_to_response,
)
from lit_rlkv.objectives.corrections import Correction
from lit_rlkv.types import Record, Rollout


@dataclass(frozen=True)
class ForwardPass:
    """Key of a forward: backbone, adapter, view and experts, on which hidden states depend."""

    backbone: str
    adapter: str | None
    shadow: bool
    routing: bool = True
    """False if the routers choose for themselves, whatever the rollout recorded."""

    def record_of(self, rollout: Rollout) -> Record:
        """Return what this forward replays of a rollout."""
        return rollout.record.view(rollout.attention_mask, shadow=self.shadow, routing=self.routing)


ENTROPY = "entropy"
"""Not a role: the entropy of the policy, from the policy's own pass."""


def critic_sees_shadow(roles: RolesConfig, correction: Correction, cache: CacheSpec) -> bool:
    """True if the critic has the shadow view; under an exact cache it has the policy's view."""
    if correction.samples_dense or cache.is_exact:
        return correction.replays
    return roles.value_view == "shadow"


def forward_pass_of(roles: Roles, role: str, shadow: bool) -> ForwardPass:
    """Return the forward pass of a role; roles with equal passes share it and differ only in their heads."""
    role = "policy" if role == ENTROPY else role
    return ForwardPass(roles.layout.backbone[role], roles.layout.adapter[role], shadow)


@torch.no_grad()
def score_rollout(
    roles: Roles,
    rollout: Rollout,
    views: Mapping[str, bool],
    *,
    temperature: float | int,
    tokens_per_pass: int = TOKENS_PER_PASS,
    on_progress: Callable[[int], object] = lambda n_rows: None,
) -> dict[str, Tensor]:
    """Return by role log-probs [batch, seq] of policy and reference, values [batch, seq], rewards [batch].

    `ENTROPY` is the entropy of the policy [batch, seq]. Log-probs, entropies and values are 0 outside
    `response_mask`; a value is that of the state before the token.

    Args:
        views: True for roles with the shadow view (the keys that the sampler saw), False for the dense view.
        temperature: the temperature of the rollout.
        tokens_per_pass: most tokens in one forward, padding included.
        on_progress: called after each pass with its number of responses.

    Raises:
        ValueError: the rollout exceeds the model's positions.
    """
    check_length(roles.backbone("policy"), rollout.input_ids.shape[1])
    if not views:
        on_progress(len(rollout.input_ids))
        return {}
    pass_of = {role: _pass_over(rollout, roles, role, shadow) for role, shadow in views.items()}
    parts: dict[str, list[Tensor]] = defaultdict(list)
    order: list[Tensor] = []
    for rows, part in passes(rollout, tokens_per_pass):
        hidden = {one: _hidden(roles, part, one) for one in dict.fromkeys(pass_of.values())}
        order.append(rows)
        for role in views:
            states = hidden[pass_of[role]]
            values = _read(roles, role, part, states, temperature)
            parts[role].append(values if role == "reward" else unpacked(values, rollout.attention_mask, rows))
        on_progress(len(rows))
    back = torch.cat(order).argsort()
    return {role: torch.cat(values)[back] for role, values in parts.items()}


def _pass_over(rollout: Rollout, roles: Roles, role: str, shadow: bool) -> ForwardPass:
    """Return the forward pass of a role over this rollout; a reward depends on the text alone."""
    found = forward_pass_of(roles, role, shadow)
    chooses = role == "reward" and rollout.record.expert_ids is not None
    return replace(found, routing=False) if chooses else found


def _read(
    roles: Roles,
    role: str,
    rollout: Rollout,
    hidden: Float[Tensor, "batch seq dim"],
    temperature: float | int,
) -> Tensor:
    if role == "reward":
        return roles.head(role)(last_token(hidden, rollout.attention_mask))
    predicts = hidden[:, :-1][rollout.response_mask[:, 1:]]
    if role == "value":
        return scatter_to_response(rollout, roles.head(role)(predicts))
    if role == ENTROPY:
        return response_logps_and_entropy(roles.backbone("policy"), rollout, predicts, temperature)[1]
    return response_logps(roles.backbone(role), rollout, predicts, temperature)


def _hidden(roles: Roles, rollout: Rollout, one: ForwardPass) -> Float[Tensor, "batch seq dim"]:
    backbone = roles.named_backbone(one.backbone)
    with use_adapter(lora_layers(backbone), one.adapter):
        return learner_states(
            backbone,
            rollout.input_ids,
            rollout.attention_mask,
            prompt_columns(rollout),
            one.record_of(rollout),
        )
