"""Sources of the variance of the policy's gradient: sampling, rewards, reweighting."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.callbacks.gradient_variance import (
    GradientDiagnostic,
    Losses,
    Vectors,
    added,
    algorithm_loss,
    policy_outputs,
)
from lit_rlkv.diagnostics.covariance import PartGradients
from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutPart, RolloutSplit
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.modules.base import StepOutputs
from lit_rlkv.objectives.corrections import (
    CORRECTIONS,
    CorrectionName,
    WeightFn,
    global_is_weights,
    unweighted,
)
from lit_rlkv.objectives.kl import kl_penalty
from lit_rlkv.settings import dataclass
from lit_rlkv.types import TrainBatch


@dataclass(eq=False)
class GradientSources(GradientDiagnostic):
    """Splits the variance of the algorithm's gradient Σ_t w_t·A_t·s_t, s_t = ∇ log π_t, by source.

    `sampling` is V[c·s], where every token has the same advantage c, the root mean square of A: the variance
    if rewards of that size were independent of the responses. `rewards` is V[A·s] − V[c·s], the effect of
    the relation of rewards and responses. `reweighting` is V[w·A·s] − V[A·s], the effect of importance
    weights and of rejected data. They add up to `total` = V[w·A·s]. All are measured on the same parts, so
    their differences have a much smaller error than each variance.

    Preference pairs always have advantages 1 and −1, so `rewards` is 0.
    """

    name = "gradient_sources"
    counterfactual: CorrectionName | None = None
    """also measure the gradient of a dense learner with this correction on the same rollout; null: no"""

    def measure_updates(self, experience: Experience, split: RolloutSplit) -> None:
        if not self.has_parts(experience):
            return
        module = self.policy
        self._decompose("gradient/sources", experience, split, shadow=module.replays)
        if self.counterfactual is not None and module.replays:
            experience = self._with_dense_learner(experience, split, CORRECTIONS[self.counterfactual])
            self._decompose("gradient/counterfactual", experience, split, shadow=False)
        torch.clear_autocast_cache()

    def _decompose(self, prefix: str, experience: Experience, split: RolloutSplit, *, shadow: bool) -> None:
        n_parts, response_mask = self.n_parts_of(experience), experience.rollout.response_mask
        log_ratio = experience.old_logps - experience.rollout.rollout_logps
        equal = replace(experience, weights=unweighted(log_ratio, response_mask))
        constant = with_advantage(rms_advantage(split(equal, n_parts)), split(equal, n_parts))
        variants = [constant, split(equal, n_parts), split(experience, n_parts)]
        if not is_weighted(experience):
            del variants[-1]
        variances = self._variances(zip(*variants, strict=True), len(variants), shadow=shadow)
        if variances:
            sampled, rewarded, total = variances[0], variances[1], variances[-1]
            self.scalars[f"{prefix}/sampling"] = sampled
            self.scalars[f"{prefix}/rewards"] = rewarded - sampled
            self.scalars[f"{prefix}/reweighting"] = total - rewarded
            self.scalars[f"{prefix}/total"] = total

    def _variances(self, variants: Iterable[Sequence[RolloutPart]], n: int, *, shadow: bool) -> list[float]:
        """Return the variance of n variants of the gradient; empty if one has too few counted parts."""
        found = [PartGradients() for _ in range(n)]
        for parts in variants:
            gradients: list[Vectors] = [{} for _ in parts]
            for batches in zip(*(part.batches for part in parts), strict=True):
                _, more = self.gradients(partial(self._forward, batches, shadow=shadow))
                gradients = [added(*pair) for pair in zip(gradients, more.values(), strict=True)]
            for one, gradient, part in zip(found, gradients, parts, strict=True):
                one.add(gradient, part.n_groups, part.share)
        spreads = [spread for spread in [one.spread() for one in found] if spread is not None]
        return [float(spread.variance.sum()) for spread in spreads] if len(spreads) == n else []

    def _forward(self, batches: Sequence[TrainBatch], *, shadow: bool) -> tuple[StepOutputs, Losses]:
        """Run one forward for batches of the same responses with different weights and advantages."""
        outputs = policy_outputs(self.policy, batches[0], shadow=shadow)
        losses = {str(i): algorithm_loss(self.policy, batch, outputs) for i, batch in enumerate(batches)}
        return outputs, losses

    def _with_dense_learner(
        self, experience: Experience, split: RolloutSplit, weight_fn: WeightFn
    ) -> Experience:
        """Return the rollout with the log-probs and weights of a dense learner."""
        module, rollout, ref_logps = self.policy, experience.rollout, experience.ref_logps
        first = next(iter(split(experience, self.n_parts_of(experience))))
        scores = score_rollout(
            module.roles,
            rollout,
            {"policy": False} | ({} if ref_logps is None else {"reference": False}),
            temperature=module.temperature,
            tokens_per_pass=first.batches[0].advantages.numel(),
        )
        dense = replace(
            experience,
            old_logps=scores["policy"],
            ref_logps=scores.get("reference"),
            weights=global_is_weights(
                weight_fn, scores["policy"] - rollout.rollout_logps, rollout.response_mask, experience.ranks
            ),
        )
        if dense.kl_estimator is None or dense.ref_logps is None:
            return dense
        logps, response_mask = (dense.old_logps, dense.ref_logps), rollout.response_mask
        return replace(dense, kl_penalty=kl_penalty(dense.kl_estimator, *logps, response_mask, dense.kl_coef))


def is_weighted(experience: Experience) -> bool:
    """True if the correction changes the weight of any response token on any rank."""
    weights, response_mask = experience.weights, experience.rollout.response_mask
    is_changed = ((weights.weight != 1) & response_mask) | (weights.is_counted != response_mask)
    return bool(over_ranks(is_changed.any().long()) > 0)


def rms_advantage(parts: Iterable[RolloutPart]) -> Float[Tensor, ""]:
    """Return √(Σ share·A² / Σ share) over the tokens, weighted by their shares of the loss."""
    sums: Tensor | float = 0.0
    for part in parts:
        for batch in part.batches:
            share = batch.loss_weight
            sums = sums + torch.stack([(share * batch.advantages.square()).sum(), share.sum()])
    assert isinstance(sums, Tensor), "a rollout has parts"
    square, weight = over_ranks(sums)
    return (square / weight.clamp(min=torch.finfo(weight.dtype).tiny)).sqrt()


def with_advantage(value: Float[Tensor, ""], parts: Iterable[RolloutPart]) -> Iterator[RolloutPart]:
    """Yield the same parts with this advantage at every response token."""
    for part in parts:
        batches = [
            replace(batch, advantages=torch.where(batch.rollout.response_mask, value, 0.0))
            for batch in part.batches
        ]
        yield replace(part, batches=batches)
