"""PPO: the clipped surrogate on GAE advantages, and a critic trained on returns (arXiv:1707.06347)."""

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
from lit_rlkv.modules.grpo import ClippedPolicy, check_positive
from lit_rlkv.objectives.clipped import clipped_value
from lit_rlkv.objectives.reduction import masked_sum
from lit_rlkv.types import TrainBatch

POSITIVE, NULLABLE = ("value_weight", "value_lr_scale"), ("value_clip", "target_kl")
"""Numbers above 0, and those of them that may be None."""


class PPO(ClippedPolicy):
    """Clipped policy loss + value_weight · mean over tokens of 0.5·max((V − R)², (V_clipped − R)²).

    Policy and critic share one forward if they have the same adapter and view (j_hydra).

    Args:
        clip_low, clip_high, delta, importance_sampling_level: see `ClippedPolicy`.
        value_weight: weight of the critic's loss.
        value_clip: values are clipped to this distance from the old values; None does not clip.
        value_shadow: the critic has the shadow view (True) or the dense view (False).
        value_lr_scale: learning rate of the critic's own parameters, relative to the policy's.
        target_kl: skip the rest of an iteration once the KL(π_old ‖ π) of a step exceeds it; None: off.
        separate_passes: run forward and backward of policy and critic one after the other, so that only one
            holds activations at a time.
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
        self.check_options(
            value_weight=value_weight,
            value_lr_scale=value_lr_scale,
            value_clip=value_clip,
            target_kl=target_kl,
        )
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
        super().check_options(**options)
        check_positive(options, POSITIVE, nullable=NULLABLE)

    def parameter_groups(self) -> list[tuple[list[nn.Parameter], float | int]]:
        policy, value = (self.roles.trained_parameters(role) for role in ("policy", "value"))
        policy_ids = {id(parameter) for parameter in policy}
        return [(policy, 1.0), ([p for p in value if id(p) not in policy_ids], self.value_lr_scale)]

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
        """The critic's roles; only its head if it shares the policy's adapter, which must not change."""
        adapter = self.roles.layout.adapter
        is_joint = adapter["policy"] is not None and adapter["policy"] == adapter["value"]
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
                f"a step of PPO must train the critic, got learners={batch.learners}; give the data module "
                "learner_parts=module.learner_parts"
            )
        if batch.ends_step and self._step_kl:  # empty while only the critic trains
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
        clipped = clipped_value(values, batch.old_values, batch.returns, self.value_clip)
        response_mask, n = batch.rollout.response_mask, batch.n_response_tokens
        value_loss = masked_sum(clipped.loss, response_mask) / n
        metrics = {
            "value_loss": value_loss,
            "value/clip_ratio": masked_sum(clipped.is_clipped.float(), response_mask) / n,
            "value/mean": masked_sum(values, response_mask) / n,
        }
        return {"value_loss": self.value_weight * value_loss}, metrics

    def on_train_batch_start(self, batch: TrainBatch, batch_idx: int) -> int | None:
        """Return -1 to skip the rest of the iteration (Lightning's protocol); synchronizes once per step."""
        kl, self._last_kl = self._last_kl, None
        if self.target_kl is None or kl is None or batch.is_first_update:
            return None
        return -1 if float(kl) > self.target_kl else None
