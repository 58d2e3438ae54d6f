"""Group baselines: advantages of a response over the other responses to the prompt."""

from collections.abc import Callable

import torch
from jaxtyping import Float
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


ESTIMATORS = {
    "grpo": grpo,
    "dr_grpo": centred,
    "dapo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "batch_std": batch_std,
}

Estimate = Callable[[Tensor], Tensor]
"""Rewards to advantages, both [prompt, group]."""

SCALED_BY_BATCH: dict[Estimate, Callable[[Tensor, Tensor], Tensor]] = {
    reinforce_pp: lambda rewards, advantages: advantages,
    batch_std: lambda rewards, advantages: rewards,
}
"""Estimators that divide by a std over the batch. The function takes rewards and centred advantages, and
returns those of the two whose std it is."""


def without_failures(
    estimate: Estimate, rewards: Float[Tensor, "prompt group"], is_valid: Tensor
) -> Float[Tensor, "prompt group"]:
    """Apply an estimator to groups without their failed responses.

    Failed responses get advantage 0, and so does a single valid one. `is_valid` is [prompt, group].
    """
    scaled = SCALED_BY_BATCH.get(estimate)
    within = estimate if scaled is None else centred
    advantages = within(rewards)
    for row in (~is_valid).any(dim=1).nonzero().flatten().tolist():
        kept = is_valid[row]
        advantages[row] = 0.0
        if int(kept.sum()) > 1:
            advantages[row, kept] = within(rewards[row, kept][None])[0]
    if scaled is not None and int(is_valid.sum()) > 1:
        advantages = advantages / (scaled(rewards, advantages)[is_valid].std() + STD_FLOOR)
    return advantages


def is_informative(rewards: Float[Tensor, "prompt group"]) -> Tensor:
    """Return [prompt] True where a group's rewards differ; DAPO (arXiv:2503.14476) drops the others."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def broadcast_to_response(
    advantages: Float[Tensor, " batch"], response_mask: Tensor
) -> Float[Tensor, "batch seq"]:
    """Spread the advantage of each response over its tokens; 0 elsewhere."""
    return torch.where(response_mask, advantages[:, None], 0.0)
