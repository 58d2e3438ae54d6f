"""Group baselines: advantages of a response over the other responses to the prompt."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL. Equal rewards have advantage 0, however large they are, because
`centred` leaves no rounding error for this small number to magnify."""


def grpo(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Return (R − mean) / std within the group, unbiased std (arXiv:2402.03300)."""
    advantages = centred(rewards)
    return advantages / (advantages.std(dim=1, keepdim=True) + STD_FLOOR)


def centred(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Return R − mean within the group, without a std: Dr. GRPO (arXiv:2503.20783)."""
    # Differences of equal numbers are 0; their mean is rounded, so subtracting it alone would leave a rest.
    differences = rewards - rewards[:, :1]
    return differences - differences.mean(dim=1, keepdim=True)


def rloo(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Return R − mean of the other responses (arXiv:2402.14740): centred, times n / (n − 1)."""
    n = rewards.shape[1]
    return centred(rewards) * n / (n - 1)


def reinforce_pp(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Return (R − group mean) / std of the batch: REINFORCE++ with baseline (arXiv:2501.03262).

    The std is over responses; verl takes it over tokens, which counts long responses more.
    """
    advantages = centred(rewards)
    return advantages / (advantages.std() + STD_FLOOR)


def batch_std(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Return (R − group mean) / std of all rewards of the batch: `scale_rewards=batch` of TRL.

    Different prompts spread the rewards of a batch, so it is never below `reinforce_pp`'s std.
    """
    return centred(rewards) / (rewards.std() + STD_FLOOR)


def gpg(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Return (R − group mean)·n / #(R ≠ 0) over the batch, as verl does for GPG (arXiv:2504.02546).

    The paper makes up for groups that teach nothing; this counts wrong responses, if their reward is 0.
    """
    return centred(rewards) / _nonzero_share(rewards)


def _nonzero_share(rewards: Tensor) -> Tensor:
    return (rewards != 0).sum().clamp(min=1) / rewards.numel()


def opo(
    rewards: Float[Tensor, "prompt group"], lengths: Int[Tensor, "prompt group"]
) -> Float[Tensor, "prompt group"]:
    """Return R − Σ length·R / Σ length within the group (arXiv:2505.23585)."""
    differences = rewards - rewards[:, :1]  # exact for equal rewards, as in `centred`
    total = lengths.sum(dim=1, keepdim=True).clamp(min=1)
    return differences - (lengths * differences).sum(dim=1, keepdim=True) / total


def gdpo(
    parts: Mapping[str, Tensor], weights: Mapping[str, float | int], is_valid: Bool[Tensor, "prompt group"]
) -> Float[Tensor, "prompt group"]:
    """Return Σ weight·`grpo`(part), which GDPO whitens over the responses of the batch (arXiv:2601.05242).

    This is TRL's `normalize_then_sum`. verl whitens over tokens, which counts long responses more.

    Args:
        parts: parts of the reward, [prompt, group] each; weight 1 for those that `weights` lacks.
    """
    return sum(
        (weights.get(name, 1) * without_failures(grpo, part, is_valid) for name, part in parts.items()),
        start=is_valid * 0.0,
    )


ESTIMATORS = {
    "grpo": grpo,
    "dr_grpo": centred,
    "dapo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "batch_std": batch_std,
    "gpg": gpg,
}

Estimate = Callable[[Tensor], Tensor]
"""Rewards to advantages, both [prompt, group]."""

SCALES_OF_BATCH: dict[Estimate, Callable[[Tensor, Tensor], Tensor]] = {
    reinforce_pp: lambda rewards, advantages: advantages.std() + STD_FLOOR,
    batch_std: lambda rewards, advantages: rewards.std() + STD_FLOOR,
    gpg: lambda rewards, advantages: _nonzero_share(rewards),
}
"""Divisors of the estimators that divide by a number of the batch, from rewards and centred advantages."""


def without_failures(
    estimate: Estimate, rewards: Float[Tensor, "prompt group"], is_valid: Tensor
) -> Float[Tensor, "prompt group"]:
    """Apply an estimator to groups without their failed responses.

    Failed responses get advantage 0, and so does a single valid one. `is_valid` is [prompt, group].
    """
    scale = SCALES_OF_BATCH.get(estimate)
    within = estimate if scale is None else centred
    advantages = within(rewards)
    for row in (~is_valid).any(dim=1).nonzero().flatten().tolist():
        kept = is_valid[row]
        advantages[row] = 0.0
        if int(kept.sum()) > 1:
            advantages[row, kept] = within(rewards[row, kept][None])[0]
    if scale is not None and int(is_valid.sum()) > 1:
        advantages = advantages / scale(rewards[is_valid], advantages[is_valid])
    return advantages


def is_informative(rewards: Float[Tensor, "prompt group"]) -> Tensor:
    """Return [prompt] True where a group's rewards differ; DAPO (arXiv:2503.14476) drops the others."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def broadcast_to_response(
    advantages: Float[Tensor, " batch"], response_mask: Tensor
) -> Float[Tensor, "batch seq"]:
    """Spread the advantage of each response over its tokens; 0 elsewhere."""
    return torch.where(response_mask, advantages[:, None], 0.0)
