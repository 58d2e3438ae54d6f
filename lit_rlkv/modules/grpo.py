"""GRPO and its relatives: a clipped surrogate on group advantages, and a KL to the reference."""

import torch
from transformers import PreTrainedModel

from lit_rlkv.masking import masked_sum, weighted_sum
from lit_rlkv.modules.base import MakeOptimizer, PolicyModule, StepOutputs, Terms
from lit_rlkv.objectives import kl, surrogate
from lit_rlkv.types import TrainBatch


class GRPO(PolicyModule):
    """−Σ weight·(correction·min(ratio·A, clip(ratio)·A) − β·KL); A and the weights come with the batch."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        make_optimizer: MakeOptimizer,
        *,
        replays: bool,
        temperature: float,
        n_decay_steps: int | None = None,
        clip_low: float,
        clip_high: float,
        kl_weight: float = 0.0,
        kl_estimator: str = "k3",
    ) -> None:
        super().__init__(
            backbone, make_optimizer, replays=replays, temperature=temperature, n_decay_steps=n_decay_steps
        )
        if kl_estimator not in kl.LOSSES:
            raise ValueError(
                f"kl_estimator={kl_estimator!r} makes no loss; choose one of {', '.join(kl.LOSSES)}"
            )
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.kl_weight = kl_weight
        self.estimate_kl = kl.LOSSES[kl_estimator]

    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        pieces = surrogate.clipped(
            outputs.logps, batch.old_logps, batch.advantages, self.clip_low, self.clip_high
        )
        losses = {"policy_loss": -weighted_sum(batch.correction * pieces.gain, batch.loss_weight)}
        is_action = batch.rollout.is_action
        n = batch.n_actions
        metrics = {
            **losses,
            "clip_ratio/low_mean": masked_sum(pieces.is_clipped_low.float(), is_action) / n,
            "clip_ratio/high_mean": masked_sum(pieces.is_clipped_high.float(), is_action) / n,
        }
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        if self.kl_weight > 0:
            token_kl = self.estimate_kl(outputs.logps, batch.ref_logps)
            losses["kl_loss"] = self.kl_weight * weighted_sum(token_kl, batch.loss_weight)
            metrics["kl"] = masked_sum(token_kl, is_action) / n
        if batch.is_fresh and self.replays:
            gap = (outputs.logps - batch.rollout.sampler_logps).abs()
            metrics["kv/replay_gap"] = torch.where(is_action, gap, 0.0).max()
        return losses, metrics
