"""What every RL module shares: the policy role, one objective, loss terms from callbacks, one optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import action_hidden, action_logps
from lit_rlkv.types import TrainBatch

Terms = dict[str, Tensor]
"""Named scalars."""


@dataclass(frozen=True)
class StepOutputs:
    """What one forward of the policy found, for the objective and for callbacks that add loss terms."""

    hidden: Float[Tensor, "action dim"]
    """States that predict the actions, under the learner's view."""
    logps: Float[Tensor, "batch seq"]
    entropy: Float[Tensor, "batch seq"]


MakeOptimizer = Callable[[list[Tensor]], Optimizer]

LossTerm = Callable[["PolicyModule", TrainBatch, StepOutputs], tuple[Terms, Terms]]
"""From a step's outputs to loss terms (added to the loss) and metrics (only logged)."""


class PolicyModule(L.LightningModule, ABC):
    """Base of the RL modules. A subclass says in `objective` what the loss of the policy is.

    Args:
        backbone: prepared, with the policy's adapter.
        make_optimizer: from parameters to an optimizer.
        replays: whether the learner sees what the sampler saw.
        temperature: the sampler's.
        n_decay_steps: optimizer steps in which the learning rate falls linearly to 0; None keeps it.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        make_optimizer: MakeOptimizer,
        *,
        replays: bool,
        temperature: float,
        n_decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.make_optimizer = make_optimizer
        self.replays = replays
        self.temperature = temperature
        self.n_decay_steps = n_decay_steps
        self.loss_terms: Sequence[LossTerm] = ()

    @abstractmethod
    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        """Loss terms and metrics of the algorithm."""

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Terms:
        """`loss` with its gradient, and metrics that add up over the micro-batches of a step."""
        if not batch.ends_step and isinstance(self._trainer, L.Trainer):
            raise ValueError(
                "lightning.Trainer steps the optimizer after every micro-batch; use n_micro_batches=1 with it"
            )
        with acting_as(self.backbone, "policy"):
            hidden = action_hidden(self.backbone, batch.rollout, shadow=self.replays)
            logps, entropy = action_logps(self.backbone, batch.rollout, hidden, self.temperature)
            outputs = StepOutputs(hidden, logps, entropy)
            losses, metrics = self.objective(batch, outputs)
            for term in self.loss_terms:
                more_losses, more_metrics = term(self, batch, outputs)
                losses, metrics = losses | more_losses, metrics | more_metrics
        loss = torch.stack(list(losses.values())).sum()
        metrics["entropy"] = entropy.sum() / batch.n_actions
        return {"loss": loss, **{name: value.detach() for name, value in metrics.items()}}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        n_decay_steps = self.n_decay_steps

        def lr_fraction(step: int) -> float:
            return 1.0 if n_decay_steps is None else max(1.0 - step / n_decay_steps, 0.0)

        scheduler = LambdaLR(optimizer, lr_fraction)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def trainable_state_dict(self) -> dict[str, Any]:
        """The parameters that training changes; the frozen backbone is saved once, elsewhere."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}
