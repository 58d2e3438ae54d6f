"""The clipped surrogate as PPO and GRPO take it from a batch, with TRL's metrics."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.checks import is_number
from lit_rlkv.modules.base import Terms
from lit_rlkv.objectives import surrogate
from lit_rlkv.objectives.kl import k3
from lit_rlkv.objectives.masking import masked_sum, weighted_sum
from lit_rlkv.types import TrainBatch


def check_clips(options: Mapping[str, Any], names: Collection[str], nullable: Collection[str] = ()) -> None:
    """Refuse bounds that are no bounds, of those options that are given.

    Args:
        nullable: those of them that may be None, which bounds nothing.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if name not in (*names, *nullable) or (value is None and name in nullable):
            continue
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name}={value} leaves nothing to learn from; give a number above 0")


def clipped_terms(
    batch: TrainBatch, logps: Float[Tensor, "batch seq"], clip_low: float, clip_high: float
) -> tuple[Terms, Terms]:
    """The policy's loss, and how often the clip was active; `approx_kl` is KL(π_old ‖ π) by k3."""
    pieces = surrogate.clipped(logps, batch.old_logps, batch.advantages, clip_low, clip_high)
    losses = {"policy_loss": -weighted_sum(batch.correction * pieces.gain, batch.loss_weight)}
    response_mask, n = batch.rollout.response_mask, batch.n_response_tokens
    low = masked_sum(pieces.is_clipped_low.float(), response_mask) / n
    high = masked_sum(pieces.is_clipped_high.float(), response_mask) / n
    metrics = {
        **losses,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "approx_kl": masked_sum(k3(batch.old_logps, logps.detach()), response_mask) / n,
    }
    return losses, metrics
