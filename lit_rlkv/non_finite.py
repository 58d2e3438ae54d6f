"""Training that diverges: skip optimizer steps with a NaN or infinite gradient, and keep no such weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_rlkv.checks import OneLineError

MAX_SKIPPED = 5
"""Consecutive optimizer steps that may be skipped."""


class NonFiniteError(OneLineError, FloatingPointError):
    """Too many consecutive non-finite gradients, or a model that has diverged."""


def find_divergence(weights: Mapping[str, Tensor], has_finite_logits: bool) -> str | None:
    """Return what of a trained model is NaN or infinite, its weights or its logits; None if nothing is."""
    broken = [name for name, value in weights.items() if not bool(value.isfinite().all())]
    if broken:
        return f"{len(broken)} of {len(weights)} weights are not finite, {broken[0]} among them"
    return None if has_finite_logits else "its logits are not finite"


class NonFiniteGuard:
    """Skips optimizer steps with a NaN or infinite gradient, and ends training after too many in a row."""

    def __init__(self, n_tolerated: int = MAX_SKIPPED) -> None:
        self.n_tolerated = n_tolerated
        self.n_in_a_row = 0

    def is_step_allowed(self, norm: Tensor, terms: Mapping[str, Tensor], loss_scale: float = 1.0) -> bool:
        """True if a gradient of this norm is finite; waits for the device.

        Args:
            terms: the losses and metrics of the step, to say which of them were not finite.
            loss_scale: factor of the loss in the backward pass. Above 1 a non-finite gradient is not counted:
                a scaler begins too high, and halves its scale each time.

        Raises:
            NonFiniteError: too many consecutive gradients were not finite.
        """
        if bool(torch.isfinite(norm)):
            self.n_in_a_row = 0
            return True
        if loss_scale > 1.0:
            return False
        self.n_in_a_row += 1
        if self.n_in_a_row > self.n_tolerated:
            raise NonFiniteError(
                f"{self.n_in_a_row} optimizer steps in a row had a gradient of norm {float(norm)}, so the "
                f"parameters no longer change; {_culprits(terms)}. Start a new run with a lower learning "
                "rate, or in float32 (fabric.precision=32-true)"
            )
        return False


def _culprits(terms: Mapping[str, Tensor]) -> str:
    bad = sorted(name for name, value in terms.items() if not bool(torch.isfinite(value).all()))
    if bad:
        return f"not finite in the last of them: {', '.join(bad)}"
    return "all losses and metrics of the last of them were finite, so it overflowed on the way back"
