"""PPO: the clipped surrogate on GAE advantages, and a critic that learns the returns (arXiv:1707.06347)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.experience.advantages import GAEAdvantage
from lit_rlkv.experience.score import forward_pass_of
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden, scatter_to_response
from lit_rlkv.modules.base import StepOutputs, Terms
from lit_rlkv.modules.clipped import ClippedPolicy, check_positive
from lit_rlkv.objectives.masking import masked_sum
from lit_rlkv.objectives.value import clipped_value
from lit_rlkv.types import TrainBatch


class PPO(ClippedPolicy):
    """Clipped policy loss + value_weight · mean over tokens of 0.5·max((V − R)², (V_clipped − R)²).

    If policy and critic share a forward (j_hydra, the same view), both losses use it.

    Args:
        clip_low, clip_high: see `ClippedPolicy`.
        value_weight: of the critic's loss beside the policy's.
        value_clip: values are clipped to within this distance of the old values; None: not clipped.
        value_shadow: the critic has the shadow view (True) or the dense view (False).
        value_lr_scale: learning rate of the critic's own parameters, relative to the policy's.
        target_kl: skip the rest of an iteration's updates once a step's KL(π_old ‖ π) exceeds it; None: off.
        separate_passes: policy and critic learn from a micro-batch one after the other, so that only one of
            them holds activations at a time.
    """

    advantage_estimator = GAEAdvantage
    required_options = ("clip_low", "clip_high", "value_clip", "value_weight")

    def __init__(
        self,
        *args: Any,
        value_clip: float | None,
        value_weight: float,
        value_shadow: bool,
        value_lr_scale: float | int = 1.0,
        target_kl: float | None = None,
        separate_passes: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.value_clip = value_clip
        self.value_weight = value_weight
        self.value_shadow = value_shadow
        self.value_lr_scale = value_lr_scale
        self.target_kl = target_kl
        self.separate_passes = separate_passes
        self._step_kl: list[Tensor] = []
        self._last_kl: Tensor | None = None

    @classmethod
    def check_options(cls, **options: Any) -> None:
        names = ("clip_low", "clip_high", "value_weight", "value_lr_scale")
        check_positive(options, names, nullable=("value_clip", "target_kl"))

    def parameter_groups(self) -> list[tuple[list[nn.Parameter], float | int]]:
        policy, value = (self.roles.trained_parameters(role) for role in ("policy", "value"))
        mine = {id(parameter) for parameter in policy}
        return [(policy, 1.0), ([p for p in value if id(p) not in mine], self.value_lr_scale)]

    @property
    def shares_forward(self) -> bool:
        policy = forward_pass_of(self.roles, "policy", self.replays)
        return policy == forward_pass_of(self.roles, "value", self.value_shadow)

    @property
    def learner_parts(self) -> tuple[tuple[str, ...], ...]:
        if self.separate_passes and not self.shares_forward:
            return (("policy",), ("value",))
        return (("policy", "value"),)

    @property
    def warmup_part(self) -> tuple[str, ...]:
        """A critic that shares the policy's adapter trains only its head, or the policy would change too."""
        is_joint = self.roles.layout.adapter["policy"] is not None and (
            self.roles.layout.adapter["policy"] == self.roles.layout.adapter["value"]
        )
        return ("value_head",) if is_joint else ("value",)

    def critic_terms(
        self, batch: TrainBatch, outputs: StepOutputs | None, policy_metrics: Terms
    ) -> tuple[Terms, Terms]:
        losses: Terms = {}
        metrics: Terms = {}
        if outputs is not None:
            self._step_kl.append(policy_metrics["approx_kl"].detach())
        if "value" in batch.learners or "value_head" in batch.learners:
            losses, metrics = self._value_terms(batch, self._values(batch, outputs))
        elif batch.ends_step:
            raise ValueError(
                f"learners={batch.learners} end a step without the critic; give the data module "
                "learner_parts=module.learner_parts"
            )
        if batch.ends_step and self._step_kl:  # none while only the critic learns
            self._last_kl, self._step_kl = over_ranks(torch.stack(self._step_kl).sum()), []
        return losses, metrics

    def _values(self, batch: TrainBatch, outputs: StepOutputs | None) -> Float[Tensor, "batch seq"]:
        if outputs is not None and self.shares_forward:
            hidden = outputs.hidden
        else:
            with acting_as(self.roles, "value") as backbone:
                hidden = response_hidden(backbone, batch.rollout, shadow=self.value_shadow)
        if "value_head" in batch.learners:
            hidden = hidden.detach()
        return scatter_to_response(batch.rollout, self.roles.head("value")(hidden))

    def _value_terms(self, batch: TrainBatch, values: Float[Tensor, "batch seq"]) -> tuple[Terms, Terms]:
        assert batch.old_values is not None
        assert batch.returns is not None
        found = clipped_value(values, batch.old_values, batch.returns, self.value_clip)
        response_mask, n = batch.rollout.response_mask, batch.n_response_tokens
        value_loss = masked_sum(found.loss, response_mask) / n
        metrics = {
            "value_loss": value_loss,
            "value/clip_ratio": masked_sum(found.is_clipped.float(), response_mask) / n,
            "value/mean": masked_sum(values, response_mask) / n,
        }
        return {"value_loss": self.value_weight * value_loss}, metrics

    def on_train_batch_start(self, batch: TrainBatch, batch_idx: int) -> int | None:
        """−1 leaves out the rest of the iteration, Lightning's own protocol; asks the device once a step."""
        kl, self._last_kl = self._last_kl, None
        if self.target_kl is None or kl is None or batch.is_first_update:
            return None
        return -1 if float(kl) > self.target_kl else None
