"""The part of a module that trains the scorer of an eviction policy, beside the loss of the tokens."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.eviction_logps import (
    KeyRecord,
    decision_logps,
    decision_scores,
    decisions_of,
    scored_layers,
)
from lit_rlkv.objectives.evictions import EvictionSums, advantages_of_decisions, eviction_sums, kl_to_uniform
from lit_rlkv.types import TrainBatch


class EvictionLearner:
    """Computes the loss of the evictions of a rollout, whose gradient is the scorer's alone.

    −weight · mean over decisions of min(ratio·A, clip(ratio)·A) + kl_coef · mean KL to the uniform choice. A
    decision is what one KV head keeps at one compaction; the means are over the whole optimizer step. The
    ratio compares the scorer with itself before the first update on the rollout, on the present keys: what
    has changed the keys meanwhile, the policy's own update, is not in it.

    Args:
        cache: the cache of the rollouts.
        weight: weight of the loss.
        clip: bound of the ratio of each decision; see `eviction_sums`.
        kl_coef: weight of the KL to a uniform draw; see `kl_to_uniform`.

    Raises:
        ValueError: the policy of the cache does not draw its survivors.
    """

    def __init__(
        self,
        cache: CacheSpec,
        scorer: nn.Module,
        *,
        weight: float | int,
        clip: float | int,
        kl_coef: float | int,
    ) -> None:
        cache.check_draws()
        self.cache = cache
        self.scorer = scorer
        self.weight = weight
        self.clip = clip
        self.kl_coef = kl_coef
        self._old: nn.Module | None = None

    def terms(
        self, backbone: PreTrainedModel, batch: TrainBatch, record: KeyRecord
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss and its metrics from the keys of the policy's forward on this micro-batch.

        The gradient is computed here, layer by layer, so that only one layer's scores are in memory.
        """
        if batch.is_first_update:
            self._old = copy.deepcopy(self.scorer).requires_grad_(False) if batch.n_steps > 1 else None
        parameters = [one for one in self.scorer.parameters() if one.requires_grad]
        gradients: list[Tensor] = [torch.zeros_like(one) for one in parameters]
        total = torch.zeros((), device=batch.advantages.device)
        n = max(batch.n_decisions, 1)
        sums: dict[str, Tensor] = {}
        for layer in scored_layers(backbone, batch.rollout.input_ids.shape[1]):
            found = self._sums(batch, layer, *record.take(layer))
            if found is None:
                continue
            loss = (self.kl_coef * found.kl - self.weight * found.gain) / n
            found_here = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for gradient, more in zip(gradients, found_here, strict=True):
                gradient += more
            total = total + loss.detach()
            values = {"logp": found.logps, "kl_uniform": found.kl.detach(), "clip_ratio": found.n_clipped}
            sums = {name: value + sums.get(name, 0.0) for name, value in values.items()}
        record.close()
        metrics = {f"eviction/{name}": value / n for name, value in sums.items()} | {"eviction/loss": total}
        # 0 in value, with the gradient that is known already.
        zeros = [
            ((p - p.detach()) * gradient).sum() for p, gradient in zip(parameters, gradients, strict=True)
        ]
        return {"eviction_loss": total + torch.stack(zeros).sum()}, metrics

    def _sums(self, batch: TrainBatch, layer: int, keys: Tensor, values: Tensor) -> EvictionSums | None:
        """Return the sums over one layer's decisions; None without any."""
        decisions = decisions_of(batch.rollout, layer, keys.shape[1], self.cache)
        if decisions.now.shape[1] == 0:
            return None
        scores = decision_scores(self.scorer, layer, keys, values, decisions.now)
        logps = decision_logps(scores, decisions)
        kl = kl_to_uniform(scores, decisions.is_candidate[..., : scores.shape[-1]])
        old_logps = logps.detach()
        if self._old is not None and not batch.is_first_update:
            with torch.no_grad():
                old_scores = decision_scores(self._old, layer, keys, values, decisions.now)
                old_logps = decision_logps(old_scores, decisions)
        advantages = advantages_of_decisions(batch.advantages, batch.loss_weight != 0, decisions.now)
        return eviction_sums(logps, old_logps, advantages, decisions.is_decision, kl, self.clip)
