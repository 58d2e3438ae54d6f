"""Base of the RL modules: the policy's forward, its objective, callbacks' loss terms, the optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from jaxtyping import Float
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_rlkv.checks import Range, check_temperature
from lit_rlkv.diagnostics.step_metrics import AXIS, checked_metrics
from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.models.backbone import head_is_frozen, head_logits, text_config
from lit_rlkv.models.eviction_logps import KeyRecord
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.preparation import has_finite_logits
from lit_rlkv.models.replay import (
    response_hidden,
    response_logps_and_entropy,
    response_sets,
    scatter_to_response,
)
from lit_rlkv.modules.evictions import EvictionLearner
from lit_rlkv.objectives import kl
from lit_rlkv.objectives.entropy import token_entropy
from lit_rlkv.objectives.reduction import masked_sum, weighted_sum
from lit_rlkv.types import TrainBatch

Terms = dict[str, Tensor]
"""Named scalars."""


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of one policy forward, for the objective and for callbacks' loss terms."""

    hidden: Float[Tensor, "action dim"]
    """Hidden states that predict the response tokens, under the learner's view."""
    logps: Float[Tensor, "batch seq"]
    """Log-probs of the response tokens at the sampler's temperature, in nats; 0 elsewhere."""
    entropy: Float[Tensor, "batch seq"]
    """Entropy of each response token's distribution, in nats; 0 elsewhere. It has no gradient."""


MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes an optimizer from parameter groups."""

LossTerm = Callable[["PolicyModule", TrainBatch, StepOutputs], tuple[Terms, Terms]]
"""Computes loss terms, added to the loss, and metrics, only logged, from the outputs of a step."""


class PolicyModule(L.LightningModule, ABC):
    """Base class of the RL modules. A subclass implements the policy's loss in `objective`.

    Args:
        roles: with the policy, and the reference if a KL to it is in the loss.
        make_optimizer: makes an optimizer from parameter groups.
        replays: True if the learner replays the evictions of the rollout.
        temperature: sampling temperature of the rollouts.
        n_decay_steps: optimizer steps over which the learning rate decays linearly to 0; None: no decay.
        n_warmup_steps: optimizer steps of linear warmup.
        kl_estimator: estimator of the KL to the reference in the loss; its coefficient is in the batch.
        kl_bias_correction: multiply the KL of each token by π/π_old; see `kl.bias_corrected`.
        entropy_coef: weight of the entropy, averaged like the loss, that is subtracted from the loss.
        policy_weight: weight of the algorithm's objective; KL, entropy and callbacks' terms are not scaled.
        evictions: trains the scorer of the rollouts' cache; None: it has none, or it stays as it is.
        eviction_lr_scale: learning rate of the scorer, relative to the policy's.
    """

    advantage_estimator: ClassVar[type] = object
    """Base class of the advantage estimators whose advantages the objective takes; here any."""
    required_options: ClassVar[tuple[str, ...]] = ()
    """Options that a config must set."""

    def __init__(
        self,
        roles: Roles,
        make_optimizer: MakeOptimizer,
        *,
        replays: bool,
        temperature: float,
        n_decay_steps: int | None = None,
        n_warmup_steps: int = 0,
        kl_estimator: str = "k3",
        kl_bias_correction: bool = False,
        entropy_coef: float | int = 0.0,
        policy_weight: float | int = 1.0,
        evictions: EvictionLearner | None = None,
        eviction_lr_scale: float | int = 1.0,
    ) -> None:
        super().__init__()
        check_temperature("temperature", temperature, is_greedy_allowed=False)
        for name, weight in {"entropy_coef": entropy_coef, "policy_weight": policy_weight}.items():
            Range(least=0).check(name, weight)
        self.roles = roles
        self.make_optimizer = make_optimizer
        self.replays = replays
        self.temperature = temperature
        self.n_decay_steps = n_decay_steps
        self.n_warmup_steps = n_warmup_steps
        self.estimate_kl = kl.LOSSES[kl_estimator]
        self.kl_bias_correction = kl_bias_correction
        self.entropy_coef = entropy_coef
        self.policy_weight = policy_weight
        self.evictions = evictions
        self.eviction_lr_scale = eviction_lr_scale
        self.loss_terms: Sequence[LossTerm] = ()

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Check the options before a model is loaded.

        Raises:
            ValueError: an option is invalid.
        """

    @property
    def learner_parts(self) -> tuple[tuple[str, ...], ...]:
        """Groups of roles; each micro-batch is processed once for each group."""
        return (("policy",),)

    @property
    def warmup_part(self) -> tuple[str, ...]:
        """Roles that train during critic warmup."""
        return ("value",)

    @abstractmethod
    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        """Return loss terms and metrics of the algorithm."""

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Terms:
        """Return `loss`, and metrics that add up over the micro-batches of a step.

        Raises:
            ValueError: under lightning.Trainer, with settings for which it would differ from our loop.
        """
        if isinstance(self._trainer, L.Trainer):
            _check_trainer(self._trainer, batch)
        outputs: StepOutputs | None = None
        losses: Terms = {}
        metrics: Terms = {}
        if "policy" in batch.learners:
            outputs, losses, metrics = self.policy_terms(batch)
        critic_losses, critic_metrics = self.critic_terms(batch, outputs, metrics)
        losses, metrics = losses | critic_losses, metrics | critic_metrics
        loss = add_zero_grads_for_unused(self, torch.stack(list(losses.values())).sum())
        return {"loss": loss, **{name: value.detach() for name, value in metrics.items()}}

    def critic_terms(
        self, batch: TrainBatch, outputs: StepOutputs | None, policy_metrics: Terms
    ) -> tuple[Terms, Terms]:
        """Return loss terms and metrics of a critic; none by default.

        Args:
            outputs: outputs of the policy, if it also trains on this micro-batch.
        """
        return {}, {}

    def policy_terms(self, batch: TrainBatch) -> tuple[StepOutputs, Terms, Terms]:
        """Return the outputs of one policy forward, its loss terms (with KL and callbacks'), and metrics."""
        with acting_as(self.roles, "policy") as backbone:
            record = None if self.evictions is None else KeyRecord()
            hidden = response_hidden(backbone, batch.rollout, shadow=self.replays, probe=record)
            found = response_logps_and_entropy(backbone, batch.rollout, hidden, self.temperature)
            outputs = StepOutputs(hidden, *found)
            objective, metrics = self.objective(batch, outputs)
            losses = {name: self.policy_weight * loss for name, loss in objective.items()}
            for term in (PolicyModule._reference_kl, PolicyModule._entropy_bonus, *self.loss_terms):
                more_losses, more_metrics = term(self, batch, outputs)
                if term in self.loss_terms:
                    callback = getattr(term, "__self__", term)
                    more_losses = checked_metrics(callback, more_losses, losses)
                    more_metrics = checked_metrics(callback, more_metrics, (AXIS, "loss"))
                losses, metrics = losses | more_losses, metrics | more_metrics
            if self.evictions is not None and record is not None:
                more_losses, more_metrics = self.evictions.terms(backbone, batch, record)
                losses, metrics = losses | more_losses, metrics | more_metrics
        metrics["entropy"] = outputs.entropy.sum() / batch.n_response_tokens
        if batch.is_first_update and self.replays:
            gap = (outputs.logps - batch.rollout.rollout_logps).abs()
            metrics["kv/replay_gap"] = torch.where(batch.rollout.response_mask, gap, 0.0).max()
        return outputs, losses, metrics

    def _reference_kl(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        if batch.kl_coef == 0:
            return {}, {}
        token_kl = self.estimate_kl(outputs.logps, batch.ref_logps)
        if self.kl_bias_correction:
            token_kl = kl.bias_corrected(token_kl, outputs.logps, batch.old_logps)
        mean_kl = masked_sum(token_kl, batch.rollout.response_mask) / batch.n_response_tokens
        return {"kl_loss": batch.kl_coef * weighted_sum(token_kl, batch.loss_weight)}, {"kl": mean_kl}

    def _entropy_bonus(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        if self.entropy_coef == 0:
            return {}, {}
        backbone = self.roles.backbone("policy")
        of_actions = token_entropy(
            outputs.hidden,
            partial(head_logits, backbone),
            self.temperature,
            text_config(backbone).vocab_size,
            head_is_frozen=head_is_frozen(backbone),
            sets=response_sets(batch.rollout),
        )
        entropy = scatter_to_response(batch.rollout, of_actions)
        return {"entropy_loss": -self.entropy_coef * weighted_sum(entropy, batch.loss_weight)}, {}

    def has_finite_logits(self) -> bool:
        """True if the policy's logits of a few tokens are finite."""
        with acting_as(self.roles, "policy") as backbone:
            return has_finite_logits(backbone)

    def idle_parameters(self, learners: Collection[str]) -> list[nn.Parameter]:
        """Return the trained parameters that get no gradient in a step of these learners on one rank."""
        learning = {id(parameter) for role in learners for parameter in self._parameters_of(role)}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in learning]

    def _parameters_of(self, learner: str) -> Iterable[nn.Parameter]:
        if learner.endswith("_head"):
            return self.roles.head(learner.removesuffix("_head")).parameters()
        return self.roles.trained_parameters(learner)

    def parameter_groups(self) -> list[tuple[list[nn.Parameter], float | int]]:
        """Return groups of trained parameters, each with the scale of its learning rate."""
        return [([p for p in self.parameters() if p.requires_grad], 1.0)]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        groups = self.parameter_groups()
        if self.evictions is not None:
            scorer = [p for p in self.evictions.scorer.parameters() if p.requires_grad]
            ids = {id(parameter) for parameter in scorer}
            groups = [([p for p in some if id(p) not in ids], scale) for some, scale in groups]
            groups.append((scorer, self.eviction_lr_scale))
        options: list[dict[str, Any]] = [{"params": parameters} for parameters, _ in groups]
        if self.evictions is not None:
            options[-1]["name"] = "eviction"  # its gradient norm is a metric of its own
        optimizer = self.make_optimizer(options)
        scheduler = LambdaLR(optimizer, [partial(self._lr_fraction, scale) for _, scale in groups])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _lr_fraction(self, scale: float | int, step: int) -> float:
        warm = min(1.0, (step + 1) / (self.n_warmup_steps + 1))
        left = 1.0 if self.n_decay_steps is None else max(1.0 - step / self.n_decay_steps, 0.0)
        return scale * warm * left


def add_zero_grads_for_unused(module: nn.Module, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Add 0 · every trained parameter to the loss under DDP, so that each parameter gets a gradient.

    Only some roles may train on a micro-batch, but DDP waits for the gradients of all parameters, and would
    drop gradients that earlier micro-batches have accumulated. Sharded layers need no such term.
    """
    if not (dist.is_available() and dist.is_initialized()) or is_sharded(module):
        return loss
    return loss + 0.0 * torch.stack([p.sum() for p in module.parameters() if p.requires_grad]).sum()


def _check_trainer(trainer: L.Trainer, batch: TrainBatch) -> None:
    if trainer.world_size > 1:
        raise ValueError(
            f"lightning.Trainer must run 1 process, got {trainer.world_size}: each would sample the same "
            "responses; use python -m lit_rlkv.fit fabric.devices=... for several"
        )
    if not batch.ends_step:
        raise ValueError(
            "lightning.Trainer steps the optimizer after every micro-batch; raise tokens_per_pass until "
            "each step has one and, for PPO, use loss.separate_passes=false with it"
        )
