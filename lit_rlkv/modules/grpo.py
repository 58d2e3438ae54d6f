"""GRPO, and the clipped surrogate that it shares with PPO."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from lit_rlkv.checks import is_number
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.objectives.clipped import clipped_surrogate
from lit_rlkv.objectives.kl import k3
from lit_rlkv.objectives.reduction import masked_sum, weighted_sum
from lit_rlkv.types import TrainBatch


class ClippedPolicy(PolicyModule):
    """Policy loss −Σ weight·correction·min(ratio·A, clip(ratio)·A), with A and the weights of the batch.

    Args:
        clip_low, clip_high: the ratio π/π_old is clipped to [1 − clip_low, 1 + clip_high] where that lowers
            the objective; infinity does not clip on its side.
    """

    required_options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def __init__(self, *args: Any, clip_low: float, clip_high: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clip_low = clip_low
        self.clip_high = clip_high

    @classmethod
    def check_options(cls, **options: Any) -> None:
        check_positive(options, ("clip_low", "clip_high"))

    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        """Return the policy loss, and metrics under TRL's names; `approx_kl` is KL(π_old ‖ π) by k3."""
        surrogate = clipped_surrogate(
            outputs.logps, batch.old_logps, batch.advantages, self.clip_low, self.clip_high
        )
        losses = {"policy_loss": -weighted_sum(batch.correction * surrogate.gain, batch.loss_weight)}
        response_mask, n = batch.rollout.response_mask, batch.n_response_tokens
        low = masked_sum(surrogate.is_clipped_low.float(), response_mask) / n
        high = masked_sum(surrogate.is_clipped_high.float(), response_mask) / n
        metrics = {
            **losses,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": masked_sum(k3(batch.old_logps, outputs.logps.detach()), response_mask) / n,
        }
        return losses, metrics


class GRPO(ClippedPolicy):
    """GRPO, Dr. GRPO, DAPO, RLOO and REINFORCE++, which differ in advantage, aggregation and clipping."""


def check_positive(
    options: Mapping[str, Any], names: Collection[str], nullable: Collection[str] = ()
) -> None:
    """Check that the given options among `names` are numbers above 0; those of `nullable` may be None.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if name not in (*names, *nullable) or (value is None and name in nullable):
            continue
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name} must be a number above 0, got {value}; at 0 nothing would be learned")
