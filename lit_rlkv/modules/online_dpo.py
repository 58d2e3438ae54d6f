"""Online DPO: preference pairs from ranked samples of the policy (arXiv:2402.04792)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.experience.advantages import PairAdvantage
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.objectives.preference import check_dpo, dpo_loss
from lit_rlkv.types import TrainBatch


class OnlineDPO(PolicyModule):
    """Mean over pairs of −log σ(β[Δlog π − Δlog π_ref]), or of the squared loss of IPO; Δ = better − worse.

    All four log-probs are under the mask of their own sequence. Importance weights of a correction multiply
    the log-ratio of each token, so they scale its gradient as in a policy gradient.

    Args:
        beta: strength of the KL to the reference.
        kind: sigmoid or ipo.
        label_smoothing: probability that a preference label is flipped (sigmoid only).
        averages: mean instead of sum of log-probs over tokens, as TRL does for ipo.
    """

    advantage_estimator = PairAdvantage
    required_options = ("beta",)

    def __init__(
        self,
        *args: Any,
        beta: float,
        kind: str = "sigmoid",
        label_smoothing: float = 0.0,
        averages: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.check_options(beta=beta, kind=kind, label_smoothing=label_smoothing)
        self.beta = beta
        self.kind = kind
        self.label_smoothing = label_smoothing
        self.averages = averages

    @classmethod
    def check_options(cls, **options: Any) -> None:
        kind, smoothing = options.get("kind", "sigmoid"), options.get("label_smoothing", 0.0)
        check_dpo(beta=options["beta"], kind=kind, label_smoothing=smoothing)

    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        chosen, rejected = self._margins(batch, outputs.logps).view(-1, 2).unbind(1)
        token_loss = dpo_loss(
            chosen, rejected, beta=self.beta, kind=self.kind, label_smoothing=self.label_smoothing
        )
        is_counted = (batch.loss_weight != 0).any(dim=1).view(-1, 2).all(dim=1)
        n = max(batch.n_pairs, 1)

        def mean(values: Tensor) -> Tensor:
            return torch.where(is_counted, values, 0.0).sum() / n

        losses = {"dpo_loss": mean(token_loss)}
        logps = outputs.logps.sum(dim=1)
        # As in TRL, without importance weights and not averaged over tokens.
        rewards = self.beta * (logps - batch.ref_logps.sum(dim=1))
        rewards_chosen, rewards_rejected = mean(rewards[::2]), mean(rewards[1::2])
        return losses, {
            **losses,
            "rewards/chosen": rewards_chosen,
            "rewards/rejected": rewards_rejected,
            "rewards/margins": rewards_chosen - rewards_rejected,
            "rewards/accuracies": mean((rewards[::2] > rewards[1::2]).float()),
            "logps/chosen": mean(logps[::2]),
            "logps/rejected": mean(logps[1::2]),
        }

    def _margins(self, batch: TrainBatch, logps: Float[Tensor, "batch seq"]) -> Float[Tensor, " batch"]:
        """Return Σ weight·(log π − log π_ref) of each response, or the mean with `averages`."""
        response_mask = batch.rollout.response_mask
        log_ratio = torch.where(response_mask, batch.correction * (logps - batch.ref_logps), 0.0).sum(dim=1)
        return log_ratio / response_mask.sum(dim=1).clamp(min=1) if self.averages else log_ratio
