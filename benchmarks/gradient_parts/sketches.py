"""Sketches and single layers of one rollout's gradients, against the whole of them."""

from typing import Any

import torch
from torch import Tensor

from lit_rlkv.callbacks.gradient_variance import GradientVariance
from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.diagnostics.covariance import CountSketch, PartGradients, block_of
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutSplit

SIZES = (256, 1024, 4096, 16384)

Sized = tuple[Tensor, int, float]
"""The gradient of a part, its prompts and its share of the denominator."""


class Sketches(RLCallback):
    """Holds the gradients of all parts of a rollout, and looks at them again through sketches.

    Args:
        exact: reads the gradients, in one block and unsketched.
        n_seeds: sketches of each size.
    """

    def __init__(self, exact: GradientVariance, n_seeds: int) -> None:
        self.exact = exact
        self.n_seeds = n_seeds
        self.found: dict[str, Any] = {}

    def on_update_start(self, experience: Experience, split: RolloutSplit) -> None:
        parts: list[Sized] = []
        for part in split(experience, self.exact.n_parts_of(experience)):
            gradients = [self.exact.gradients_of_batch(batch)[0]["loss"]["all"] for batch in part.batches]
            n_prompts, share = self.exact.size_of_part(part, "loss")
            parts.append((torch.stack(gradients).sum(dim=0), n_prompts, share))
        variance, snr = self._variance(parts)
        self.found = {
            "n_parts": len(parts),
            "n_parameters": len(parts[0][0]),
            "variance": variance,
            "snr": snr,
            "sketches": {size: self._errors(parts, size, variance) for size in SIZES},
            "blocks": self._layers(parts, variance),
        }

    def _variance(self, parts: list[Sized]) -> tuple[float, float]:
        found = PartGradients()
        for gradient, n_prompts, share in parts:
            found.add({"all": gradient}, n_prompts, share)
        spread = found.spread()
        assert spread is not None, "the rollout has a single prompt"
        variance, signal = float(spread.variance.sum()), float(spread.signal.sum())
        return variance, signal / variance

    def _errors(self, parts: list[Sized], size: int, exact: float) -> dict[str, float]:
        errors = []
        for seed in range(self.n_seeds):
            sketch = CountSketch(size, seed)
            found, _ = self._variance([(sketch("all", gradient), *size) for gradient, *size in parts])
            errors.append(found / exact - 1)
        off = torch.tensor(errors)
        return {
            "rms_error": float(off.square().mean().sqrt()),
            "mean_error": float(off.mean()),
            "bound": (2 / size) ** 0.5,
        }

    def _layers(self, parts: list[Sized], exact: float) -> dict[str, dict[str, float]]:
        parameters = self.exact.parameters
        blocks = [block_of(name, "layer") for name, p in parameters.items() for _ in range(p.numel())]
        found = {}
        for block in dict.fromkeys(blocks):
            is_inside = torch.tensor([name == block for name in blocks])
            variance, snr = self._variance([(gradient[is_inside], *size) for gradient, *size in parts])
            found[block] = {"variance_share": variance / exact, "snr": snr}
        return found
