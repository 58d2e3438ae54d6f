"""Group baselines: advantages of a response over the other responses to the prompt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.experience.gae import STD_FLOOR, centred, standard_deviation, whiten


@dataclass(frozen=True)
class Groups:
    """The rewards of all responses, a row for each prompt, and what a baseline may weigh them by."""

    rewards: Float[Tensor, "prompt group"]
    """Total rewards, less the KL of a response if that is part of the reward."""
    is_valid: Bool[Tensor, "prompt group"]
    """False where the reward failed: that response gets advantage 0 and enters no baseline."""
    lengths: Int[Tensor, "prompt group"]
    """Response tokens."""
    parts: Mapping[str, Float[Tensor, "prompt group"]]
    """Parts of the reward without the KL: the components and penalties, or the total alone."""
    weights: Mapping[str, float | int]
    """Weights of the parts; 1 for those that it lacks."""


def grpo(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return (R − mean) / std within the group, unbiased std (arXiv:2402.03300)."""
    return whiten(groups.rewards, groups.is_valid, dim=1)


def dr_grpo(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return R − mean within the group, without a std: Dr. GRPO (arXiv:2503.20783)."""
    return centred(groups.rewards, groups.is_valid, dim=1)


def rloo(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return R − mean of the other responses (arXiv:2402.14740): centred, times n / (n − 1)."""
    n = groups.is_valid.sum(dim=1, keepdim=True)
    return dr_grpo(groups) * n / (n - 1).clamp(min=1)


def reinforce_pp(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return (R − group mean) / std of the batch: REINFORCE++ with baseline (arXiv:2501.03262).

    The std is over responses; verl takes it over tokens, which counts long responses more.
    """
    advantages = dr_grpo(groups)
    return advantages / (standard_deviation(advantages, groups.is_valid) + STD_FLOOR)


def batch_std(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return (R − group mean) / std of all rewards of the batch: `scale_rewards=batch` of TRL.

    Different prompts spread the rewards of a batch, so it is never below `reinforce_pp`'s std.
    """
    return dr_grpo(groups) / (standard_deviation(groups.rewards, groups.is_valid) + STD_FLOOR)


def gpg(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return (R − group mean)·n / #(R ≠ 0) over the batch, as verl does for GPG (arXiv:2504.02546).

    The paper makes up for groups that teach nothing; this counts wrong responses, if their reward is 0.
    """
    n_nonzero = ((groups.rewards != 0) & groups.is_valid).sum().clamp(min=1)
    return dr_grpo(groups) * groups.is_valid.sum() / n_nonzero


def opo(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return R − Σ length·R / Σ length within the group (arXiv:2505.23585)."""
    return centred(groups.rewards, groups.lengths * groups.is_valid, dim=1)


def gdpo(groups: Groups) -> Float[Tensor, "prompt group"]:
    """Return Σ weight·`grpo`(part) over its std in the batch, whose mean is 0 (arXiv:2601.05242).

    This is TRL's `normalize_then_sum`. verl whitens over tokens, which counts long responses more. No part
    has the KL of the reward.
    """
    scaled = [
        groups.weights.get(name, 1) * whiten(part, groups.is_valid, dim=1)
        for name, part in groups.parts.items()
    ]
    advantages = torch.stack(scaled).sum(dim=0)
    return advantages / (standard_deviation(advantages, groups.is_valid) + STD_FLOOR)


ESTIMATORS: dict[str, Callable[[Groups], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "batch_std": batch_std,
    "gpg": gpg,
    "opo": opo,
    "gdpo": gdpo,
}
"""Advantages [prompt, group], 0 for failed responses, by the name that `GroupAdvantage` takes."""

BY_PART = ("gdpo",)
"""Those that compare each part of the reward, so that a group teaches if it differs in one of them."""


def is_informative(rewards: Float[Tensor, "prompt group"]) -> Tensor:
    """Return [prompt] True where a group's rewards differ; DAPO (arXiv:2503.14476) drops the others."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def broadcast_to_response(
    advantages: Float[Tensor, " batch"], response_mask: Tensor
) -> Float[Tensor, "batch seq"]:
    """Spread the advantage of each response over its tokens; 0 elsewhere."""
    return torch.where(response_mask, advantages[:, None], 0.0)
