"""GRPO, CISPO, REINFORCE++ and losses by a gain, with the base that they share with PPO."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_rlkv.checks import Range
from lit_rlkv.experience.advantages import GroupAdvantage, ReturnAdvantage
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.objectives.clipped import LOG_RATIOS, Surrogate, clipped_surrogate, clipped_weight
from lit_rlkv.objectives.gains import Gain, Tokens
from lit_rlkv.objectives.kl import k3
from lit_rlkv.objectives.reduction import masked_sum, weighted_sum
from lit_rlkv.types import TrainBatch


class GainPolicy(PolicyModule):
    """Policy loss −Σ weight·correction·gain, with a gain of each token; weights of the batch."""

    advantage_estimator: ClassVar[type] = GroupAdvantage

    @abstractmethod
    def gains(self, batch: TrainBatch, logps: Tensor) -> Surrogate:
        """Return the objective at each token, from log π [batch, seq]."""

    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        """Return the policy loss, and metrics under TRL's names; `approx_kl` is KL(π_old ‖ π) by k3."""
        response_mask, n = batch.rollout.response_mask, batch.n_response_tokens
        surrogate = self.gains(batch, outputs.logps)
        losses = {"policy_loss": -weighted_sum(batch.correction * surrogate.gain, batch.loss_weight)}
        masks = (surrogate.is_clipped_low, surrogate.is_clipped_high, surrogate.is_clipped_delta)
        low, high, delta = (masked_sum(mask.float(), response_mask) / n for mask in masks)
        metrics = {
            **losses,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "clip_ratio/delta_mean": delta,
            "approx_kl": masked_sum(k3(batch.old_logps, outputs.logps.detach()), response_mask) / n,
        }
        return losses, metrics


class TokenLoss(GainPolicy):
    """Gain of each token by a function of `lit_rlkv.objectives.gains`, or of your own; options above 0."""

    required_options: ClassVar[tuple[str, ...]] = ("gain",)

    def __init__(self, *args: Any, gain: Gain, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = gain

    @classmethod
    def check_options(cls, **options: Any) -> None:
        check_positive(options["gain"].keywords, options["gain"].keywords)

    def gains(self, batch: TrainBatch, logps: Tensor) -> Surrogate:
        response_mask = batch.rollout.response_mask
        is_chosen = torch.zeros_like(response_mask) if batch.is_chosen is None else batch.is_chosen
        return self.gain(Tokens(logps, batch.old_logps, batch.advantages, response_mask, is_chosen))


class RatioPolicy(GainPolicy):
    """Gain that bounds the ratio π/π_old.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high].
        importance_sampling_level: token, or sequence for one ratio per response (GSPO).
    """

    required_options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def __init__(
        self,
        *args: Any,
        clip_low: float,
        clip_high: float,
        importance_sampling_level: str = "token",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.check_options(
            clip_low=clip_low, clip_high=clip_high, importance_sampling_level=importance_sampling_level
        )
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.log_ratio_at_level = LOG_RATIOS[importance_sampling_level]

    @classmethod
    def check_options(cls, **options: Any) -> None:
        check_positive(options, ("clip_low", "clip_high"))
        level = options.get("importance_sampling_level", "token")
        if level not in LOG_RATIOS:
            raise ValueError(
                f"importance_sampling_level={level!r} is unknown; choose one of {', '.join(LOG_RATIOS)}"
            )

    def log_ratio(self, batch: TrainBatch, logps: Tensor) -> Tensor:
        """Return log π − log π_old at the level of the ratio."""
        return self.log_ratio_at_level(logps - batch.old_logps, batch.rollout.response_mask)


class ClippedPolicy(RatioPolicy):
    """Gain min(ratio·A, clip(ratio)·A); see `clipped_surrogate`.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high] where that lowers the
            objective.
        delta: upper bound of the ratio where the advantage is negative (TRL's `delta`, verl's
            `clip_ratio_c`); None: no bound.
    """

    def __init__(self, *args: Any, delta: float | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.check_options(clip_high=options["clip_high"], delta=delta)
        self.delta = delta

    @classmethod
    def check_options(cls, **options: Any) -> None:
        super().check_options(**options)
        check_positive(options, (), nullable=("delta",))
        delta = options.get("delta")
        if delta is not None and not delta > 1 + options["clip_high"]:
            raise ValueError(
                f"delta must be above 1 + clip_high = {1 + options['clip_high']:g}, got {delta}: a lower one "
                "would clip good tokens too; raise it, or use null"
            )

    def gains(self, batch: TrainBatch, logps: Tensor) -> Surrogate:
        clips = (self.clip_low, self.clip_high, self.delta)
        return clipped_surrogate(self.log_ratio(batch, logps), batch.advantages, *clips)


class GRPO(ClippedPolicy):
    """GRPO, Dr. GRPO, DAPO, GSPO, RLOO and REINFORCE++ with group baseline.

    They differ in advantage, aggregation, level of the ratio and clipping.
    """


class Reinforce(ClippedPolicy):
    """REINFORCE++ without group baseline: the clipped loss on whitened returns (arXiv:2501.03262)."""

    advantage_estimator = ReturnAdvantage


class CISPO(RatioPolicy):
    """Gain sg(clip(ratio))·A·log π; see `clipped_weight`.

    Args:
        clip_low, clip_high: the weight is clipped to [1 − clip_low, 1 + clip_high]; clip_low=1 is no lower
            bound, as in the paper and TRL, whose `epsilon_high` is 1 + clip_high.
    """

    def gains(self, batch: TrainBatch, logps: Tensor) -> Surrogate:
        clips = (self.clip_low, self.clip_high)
        return clipped_weight(self.log_ratio(batch, logps), logps, batch.advantages, *clips)


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
        Range(above=0).check(name, value, hint="at 0 nothing would be learned")
