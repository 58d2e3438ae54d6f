"""Variance of the policy's gradient, estimated from parts of the rollout before the update."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rlkv.callbacks.gradient_parts import (
    GradientDiagnostic,
    Losses,
    Vectors,
    added,
    algorithm_loss,
    policy_outputs,
)
from lit_rlkv.diagnostics.covariance import PartGradients
from lit_rlkv.diagnostics.variance_proxy import proxy_sums, squared_probs, variance_proxy
from lit_rlkv.experience.advantages import PairAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutPart, RolloutSplit
from lit_rlkv.models.backbone import head_logits, text_config
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import scatter_to_response
from lit_rlkv.modules.base import StepOutputs
from lit_rlkv.types import TrainBatch

TERMS = ("policy", "loss")
"""`policy` is the algorithm's objective; `loss` is the policy's loss with KL and callbacks' terms."""


class GradientVariance(GradientDiagnostic):
    """Variance, signal-to-noise ratio and noise scale of the policy's gradient, and verl's variance proxies.

    Each part of the rollout estimates the same gradient from other prompts, so the spread of the parts gives
    the variance between rollouts, for the policy before its first update. See
    `lit_rlkv.diagnostics.covariance`. The critic's loss is left out, also if it trains the same adapter.
    During critic warmup this is the gradient that the policy would get.

    Args:
        terms: the losses to measure, from `TERMS`.
    """

    name = "gradient"

    def __init__(self, every: int, terms: Sequence[str] = TERMS, **options: Any) -> None:
        super().__init__(every, **options)
        self.terms = tuple(term for term in TERMS if term in terms)
        unknown = sorted(set(terms) - set(TERMS))
        if unknown or not self.terms:
            raise ValueError(
                f"diagnostics.gradient.terms must name one or more of {', '.join(TERMS)}, got {list(terms)}"
            )

    def measure_updates(self, experience: Experience, split: RolloutSplit) -> None:
        if not self.has_parts(experience):
            return
        found = {term: PartGradients() for term in self.terms}
        sums = torch.zeros(4, device=experience.rollout.input_ids.device)
        for part in split(experience, self.n_parts_of(experience)):
            gradients: dict[str, Vectors] = {term: {} for term in self.terms}
            for batch in part.batches:
                more, batch_sums = self.gradients_of_batch(batch)
                gradients = {term: added(gradients[term], more[term]) for term in self.terms}
                sums = sums + batch_sums
            for term in self.terms:
                found[term].add(gradients[term], *self.size_of_part(part, term))
        torch.clear_autocast_cache()
        self._report(found, sums)

    def size_of_part(self, part: RolloutPart, term: str) -> tuple[int, float]:
        """Return the number of prompts of the part that count in this term, and its share of the denominator.

        Loss terms of callbacks are averaged over all response tokens, including tokens that the algorithm
        drops. A loss with both has two denominators and is treated as a mean over tokens: the gradient of a
        KL is mostly signal, which a wrong share would count as noise; that of rewards is mostly noise.
        """
        if term == "loss" and self.policy.loss_terms:
            return part.n_prompts, part.token_share
        return part.n_groups, part.share

    def gradients_of_batch(self, batch: TrainBatch) -> tuple[dict[str, Vectors], Tensor]:
        """Return the gradient of each term from one micro-batch, and its sums for the proxies."""
        outputs, found = self.gradients(partial(self._forward, batch))
        by_term = {term: found[term if term in found else "loss"] for term in self.terms}
        return by_term, self._proxy_sums(batch, outputs)

    def _report(self, found: Mapping[str, PartGradients], sums: Tensor) -> None:
        square = None
        for term, parts in found.items():
            spread = parts.spread()
            if spread is None:
                continue
            self.scalars |= spread.scalars(f"gradient/{term}")
            self.arrays["blocks"] = list(spread.blocks)
            self.arrays[term] = {
                "n_prompts": spread.n_prompts,
                "variance": spread.variance.tolist(),
                "signal": spread.signal.tolist(),
            }
            if term == "policy" and self.only is None:
                square = float(spread.square.sum())
        if not issubclass(self.policy.advantage_estimator, PairAdvantage):
            self.scalars |= variance_proxy(sums, square)

    def _forward(self, batch: TrainBatch) -> tuple[StepOutputs, Losses]:
        """Return the losses to differentiate; only one if there are no terms beside the objective."""
        module = self.policy
        if self.terms == ("policy",):
            outputs = policy_outputs(module, batch, shadow=module.replays)
            return outputs, {"policy": algorithm_loss(module, batch, outputs)}
        torch.clear_autocast_cache()
        outputs, losses, _ = module.policy_terms(batch)
        total = {"loss": torch.stack(list(losses.values())).sum()}
        if self.terms == ("loss",) or losses.keys() == module.objective(batch, outputs)[0].keys():
            return outputs, total
        return outputs, {"policy": algorithm_loss(module, batch, outputs)} | total

    def _proxy_sums(self, batch: TrainBatch, outputs: StepOutputs) -> Tensor:
        module = self.policy
        with torch.no_grad(), acting_as(module.roles, "policy") as backbone:
            head, size = partial(head_logits, backbone), text_config(backbone).vocab_size
            squares = squared_probs(outputs.hidden, head, module.temperature, size)
            return proxy_sums(
                outputs.logps,
                scatter_to_response(batch.rollout, squares),
                batch.advantages,
                batch.correction,
                batch.loss_weight != 0,
            )
