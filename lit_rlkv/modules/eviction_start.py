"""Trains the scorer of an eviction policy before RL, on the model's own dense attention to demonstrations."""

from collections.abc import Callable, Collection
from typing import Any, cast

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lit_rlkv.data.demonstrations import DemonstrationBatch, SFTBatch, dense_hidden
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.scorer import KVScorer
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.models.backbone import layer_kinds
from lit_rlkv.models.eviction_logps import scored_layers
from lit_rlkv.models.future_attention import future_attention, last_kept
from lit_rlkv.models.preparation import has_finite_logits
from lit_rlkv.modules.base import add_zero_grads_for_unused
from lit_rlkv.modules.hydra_sft import warmup_and_decay


class EvictionStart(L.LightningModule):
    """Minimizes softplus(−y·(r_new − r_edge)), as KVpop (arXiv:2607.05061) with τ = 1.

    r_new is the score of a key as it leaves the window, r_edge that of the last key that a teacher still
    keeps then. y is 1 if the new one has more `future_attention`, else −1. With τ = 1 the loss is −log of the
    probability that the Gumbel noise of rollouts leaves the two in the teacher's order.

    Args:
        backbone: a prepared backbone, which is frozen.
        scorer: made by the policy of the cache for this backbone.
        make_optimizer: makes an optimizer from parameters.
        cache: whose sizes say when a key leaves the window, and how many are kept.
        lr_scale: learning rate, relative to the optimizer's.
        n_steps: total optimizer steps, including `n_warmup_steps`.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        scorer: nn.Module,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        *,
        cache: CacheSpec,
        lr_scale: float | int,
        n_steps: int,
        n_warmup_steps: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.scorer = scorer
        self.make_optimizer = make_optimizer
        self.cache = cache
        self.schedule = (n_steps, n_warmup_steps, lr_scale)
        kinds = [kind for kind in layer_kinds(backbone) if kind.attends]
        own = iter(cache.layer_budgets(sum(kind.in_profile for kind in kinds)))
        self.budgets = [next(own) if kind.in_profile else cache.budget for kind in kinds]

    def training_step(self, batch: SFTBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return `loss` and the metric `eviction_loss`: means over heads of sums over keys, by targets."""
        losses: list[Tensor] = []
        layers = scored_layers(self.backbone, batch.chosen.input_ids.shape[1])

        def look(inputs: AttentionInputs) -> None:
            if inputs.layer in layers:
                losses.append(self._layer_loss(batch.chosen, inputs))

        with torch.no_grad():
            dense_hidden(self.backbone, batch.chosen, probe=look)
        loss = torch.stack(losses).mean() / batch.n_targets
        return {"loss": add_zero_grads_for_unused(self, loss), "eviction_loss": loss.detach()}

    def _layer_loss(self, rows: DemonstrationBatch, inputs: AttentionInputs) -> Float[Tensor, ""]:
        """Return the mean over KV heads of the sum over keys, each compared with the edge of its time."""
        cache, is_token, keys, values = self.cache, rows.attention_mask, inputs.key, inputs.value
        delay = cache.window + 1  # first query without the key in its window, which here leaves out the query
        column = torch.arange(is_token.shape[1], device=is_token.device)
        begin = is_token.int().argmax(dim=1, keepdim=True) + cache.sink
        if cache.protect_prompt:
            begin = torch.maximum(begin, rows.is_target.int().argmax(dim=1, keepdim=True))
        leaves = F.pad(is_token, (0, delay))[:, delay:]  # the row has a query without the key in its window
        is_candidate = is_token & leaves & (column >= begin)
        target = future_attention(inputs, is_token, delay)
        n_beside = cache.window + (0 if cache.protect_prompt else cache.sink)
        edge = last_kept(target, is_candidate, self.budgets[inputs.layer] - n_beside)
        is_pair, edge = is_candidate[:, None] & (edge >= 0), edge.clamp(min=0)
        sign = torch.where(target > target.gather(2, edge), 1.0, -1.0)
        kept = [each.gather(2, edge[..., None].expand(*edge.shape, each.shape[3])) for each in (keys, values)]
        ages = [torch.full_like(edge, delay), column + delay - edge]
        with torch.enable_grad():
            scorer = cast(KVScorer, self.scorer).layer(inputs.layer)
            new, old = (
                scorer(*pair, age[:, :, None].float().log1p())[:, :, 0]
                for pair, age in zip(((keys, values), kept), ages, strict=True)
            )
            losses = F.softplus(-sign * (new - old)).masked_fill(~is_pair, 0.0)
            return losses.sum() / losses.shape[1]

    def has_finite_logits(self) -> bool:
        """True if the LM's logits of a few tokens are finite."""
        return has_finite_logits(self.backbone)

    def idle_parameters(self, learners: Collection[str]) -> list[nn.Parameter]:
        """Return none: each step trains the whole scorer."""
        return []

    def configure_optimizers(self) -> Any:
        return warmup_and_decay(self.make_optimizer(list(self.scorer.parameters())), *self.schedule)
