"""Hydra-SFT: the LM head and the reward head trained together on one backbone (arXiv:2309.00754)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from lit_rlkv.data.demonstrations import WarmupBatch
from lit_rlkv.data.pairs import DemonstrationBatch
from lit_rlkv.kernels.token_logps import token_logps
from lit_rlkv.models.backbone import head_logits, hidden_states, text_config, token_positions
from lit_rlkv.models.heads import ScalarHead, last_token
from lit_rlkv.models.replay import dense_death
from lit_rlkv.objectives.preference import ranking_loss

FINAL_LR_FRACTION = 0.02


class HydraSFT(L.LightningModule):
    """CE(chosen) + reward_weight · −log σ(r(chosen) − r(rejected)); learning rate warmed up, then cosine."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        *,
        reward_weight: float,
        n_steps: int,
        n_warmup_steps: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.reward_head = ScalarHead(text_config(backbone).hidden_size).to(backbone.device)
        self.make_optimizer = make_optimizer
        self.reward_weight = reward_weight
        self.n_steps = n_steps
        self.n_warmup_steps = n_warmup_steps

    def training_step(self, batch: WarmupBatch, batch_idx: int) -> dict[str, Tensor]:
        hidden = self._hidden(batch.chosen)
        lm_loss = self._lm_loss(batch.chosen, hidden)
        n_pairs = len(batch.rejected.token_ids)
        chosen = self.reward_head(last_token(hidden[:n_pairs], batch.chosen.is_token[:n_pairs]))
        rejected = self.reward_head(last_token(self._hidden(batch.rejected), batch.rejected.is_token))
        reward_loss = ranking_loss(chosen, rejected)
        return {
            "loss": lm_loss + self.reward_weight * reward_loss,
            "lm_loss": lm_loss.detach(),
            "reward_loss": reward_loss.detach(),
            "pair_accuracy": (chosen > rejected).float().mean(),
            "margin": (chosen - rejected).detach().mean(),
        }

    def _hidden(self, batch: DemonstrationBatch) -> Float[Tensor, "batch seq dim"]:
        positions = token_positions(batch.is_token)
        return hidden_states(self.backbone, batch.token_ids, positions, death=dense_death(batch.is_token))

    def _lm_loss(
        self, batch: DemonstrationBatch, hidden: Float[Tensor, "batch seq dim"]
    ) -> Float[Tensor, ""]:
        predicts = hidden[:, :-1][batch.is_target[:, 1:]]
        head = partial(head_logits, self.backbone)
        targets = batch.token_ids[batch.is_target]
        logps, _ = token_logps(predicts, head, targets, 1.0, text_config(self.backbone).vocab_size)
        return -logps.mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(list(self.parameters()))
        scheduler = LambdaLR(optimizer, self._lr_fraction)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _lr_fraction(self, step: int) -> float:
        warm = min(1.0, (step + 1) / max(self.n_warmup_steps, 1))
        cosine = (1 + math.cos(math.pi * min(step / self.n_steps, 1.0))) / 2
        return warm * max(cosine, FINAL_LR_FRACTION)
