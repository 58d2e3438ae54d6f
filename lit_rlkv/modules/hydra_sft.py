"""Hydra-SFT: an LM head and a reward head on one backbone, trained together or apart (arXiv:2309.00754)."""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from lit_rlkv.checks import Range
from lit_rlkv.data.demonstrations import DemonstrationBatch, SFTBatch, dense_hidden
from lit_rlkv.kernels.token_logps import token_logps
from lit_rlkv.models.activations import Checkpoints, checkpoint_layers, checkpointing
from lit_rlkv.models.backbone import head_logits, text_config
from lit_rlkv.models.heads import ScalarHead, last_token
from lit_rlkv.models.preparation import has_finite_logits
from lit_rlkv.modules.base import add_zero_grads_for_unused
from lit_rlkv.objectives.preference import ranking_loss

FINAL_LR_FRACTION = 0.02


class HydraSFT(L.LightningModule):
    """Minimizes lm_weight · CE(chosen) + reward_weight · −log σ(r(chosen) − r(rejected)).

    A head of weight 0 costs nothing: without the reward head rejected responses are not read, and without the
    LM head only the rows of pairs are. The learning rate has linear warmup and cosine decay.

    Args:
        backbone: a prepared backbone; all its parameters train.
        make_optimizer: makes an optimizer from parameters.
        reward_head: a head to continue training; None starts at zero.
        checkpoints_layers: as of `Roles`.
        n_steps: total optimizer steps, including `n_warmup_steps`.

    Raises:
        ValueError: a weight is negative or not finite, both are 0, or the backbone has no layers that can be
            checkpointed.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        *,
        lm_weight: float | int = 1.0,
        reward_weight: float | int,
        n_steps: int,
        n_warmup_steps: int,
        reward_head: ScalarHead | None = None,
        checkpoints_layers: Checkpoints = False,
    ) -> None:
        super().__init__()
        for name, weight in {"lm_weight": lm_weight, "reward_weight": reward_weight}.items():
            Range(least=0).check(name, weight)
        if lm_weight == 0 and reward_weight == 0:
            raise ValueError(
                "lm_weight or reward_weight must not be 0, got 0 for both; give one of them a weight"
            )
        self.backbone = backbone
        self.reward_head: ScalarHead | None = None
        """None if its weight is 0."""
        if reward_weight != 0:
            fresh = ScalarHead(text_config(backbone).hidden_size)
            self.reward_head = (reward_head or fresh).to(backbone.device)
        self.make_optimizer = make_optimizer
        self.lm_weight = lm_weight
        self.reward_weight = reward_weight
        self.n_steps = n_steps
        self.n_warmup_steps = n_warmup_steps
        self.checkpoints_layers = checkpoints_layers
        checkpoint_layers(backbone, checkpoints_layers)

    def training_step(self, batch: SFTBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return `loss`, and metrics of the heads that train; they add up over the parts of a step."""
        with checkpointing(self.backbone, self.checkpoints_layers):
            return self._losses(batch)

    def _losses(self, batch: SFTBatch) -> dict[str, Tensor]:
        is_unpaired = batch.rejected is None and batch.n_pairs > 0  # the pairs are in other micro-batches
        chosen = batch.chosen
        if self.lm_weight == 0:
            if is_unpaired:
                zero = torch.zeros((), device=chosen.input_ids.device, requires_grad=True)
                return {"loss": add_zero_grads_for_unused(self, zero)}
            chosen = chosen.rows(slice(len(self._rejected(batch).input_ids)))
        hidden = dense_hidden(self.backbone, chosen)
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        if self.lm_weight != 0:
            lm_loss = self._lm_loss(chosen, hidden, batch.n_targets)
            losses.append(self.lm_weight * lm_loss)
            metrics["lm_loss"] = lm_loss.detach()
        if self.reward_head is not None and not is_unpaired:
            rejected = self._rejected(batch)
            n_pairs = len(rejected.input_ids)
            better = self.reward_head(last_token(hidden[:n_pairs], chosen.attention_mask[:n_pairs]))
            worse = self.reward_head(
                last_token(dense_hidden(self.backbone, rejected), rejected.attention_mask)
            )
            reward_loss = ranking_loss(better, worse) / batch.n_pairs
            losses.append(self.reward_weight * reward_loss)
            metrics["reward_loss"] = reward_loss.detach()
            # Ties and NaN count as wrong.
            metrics["pair_accuracy"] = (better > worse).float().sum() / batch.n_pairs
            metrics["margin"] = (better - worse).detach().sum() / batch.n_pairs
        return {"loss": add_zero_grads_for_unused(self, torch.stack(losses).sum()), **metrics}

    def _rejected(self, batch: SFTBatch) -> DemonstrationBatch:
        if batch.rejected is None:
            raise ValueError(
                f"reward_weight={self.reward_weight} needs preference pairs, and this batch has none; set "
                "n_pairs of the data, or reward_weight=0"
            )
        return batch.rejected

    def _lm_loss(
        self, batch: DemonstrationBatch, hidden: Float[Tensor, "batch seq dim"], n_targets: int
    ) -> Float[Tensor, ""]:
        predicts = hidden[:, :-1][batch.is_target[:, 1:]]
        head = partial(head_logits, self.backbone)
        targets = batch.input_ids[batch.is_target]
        logps = token_logps(predicts, head, targets, 1.0, text_config(self.backbone).vocab_size)
        return -logps.sum() / n_targets

    def has_finite_logits(self) -> bool:
        """True if the LM's logits of a few tokens are finite."""
        return has_finite_logits(self.backbone)

    def idle_parameters(self, learners: Collection[str]) -> list[nn.Parameter]:
        """Return the LM head's parameters if only the reward head has a loss and the head is not tied."""
        head = self.backbone.get_output_embeddings()
        is_tied = head.weight is self.backbone.get_input_embeddings().weight
        return [] if self.lm_weight != 0 or is_tied else list(head.parameters())

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(list(self.parameters()))
        return warmup_and_decay(optimizer, self.n_steps, self.n_warmup_steps)


def warmup_and_decay(
    optimizer: Optimizer, n_steps: int, n_warmup_steps: int, scale: float | int = 1.0
) -> dict[str, Any]:
    """Return an optimizer with its schedule in Lightning's form: linear warmup, cosine decay."""

    def lr_fraction(step: int) -> float:
        warm = min(1.0, (step + 1) / max(n_warmup_steps, 1))
        cosine = (1 + math.cos(math.pi * min(step / n_steps, 1.0))) / 2
        return scale * warm * max(cosine, FINAL_LR_FRACTION)

    scheduler = LambdaLR(optimizer, lr_fraction)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
