"""Changes to rewards before advantages: missing-EOS penalty, normalisation, clipping."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to the standard deviation: rewards that are all equal become 0, not 0/0."""


def missing_eos_penalty(
    rewards: Float[Tensor, " batch"], has_eos: Bool[Tensor, " batch"], penalty: float | int
) -> Float[Tensor, " batch"]:
    """`penalty` subtracted from responses that were cut off before they ended."""
    return torch.where(has_eos, rewards, rewards - penalty)


def normalise_batch(rewards: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """(R − mean) / std over the batch, unbiased std; 0 where all are equal."""
    centred = rewards - rewards.mean()
    variance = centred.square().sum() / max(len(rewards) - 1, 1)
    return centred / (variance.sqrt() + STD_FLOOR)


def clip_rewards(rewards: Float[Tensor, " batch"], bound: float | int | None) -> Float[Tensor, " batch"]:
    """Rewards kept within ±`bound`; None bounds nothing."""
    return rewards if bound is None else rewards.clamp(-bound, bound)


class RunningMoments:
    """Mean and deviation of every value seen so far, however it was split into batches.

    Python floats, so that the sums are in double precision and the state can be written as JSON.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0
        """Σ (value − mean)²."""

    def update(self, values: Float[Tensor, " batch"]) -> None:
        """Merge a batch (Chan, Golub and LeVeque, 'Updating Formulae', 1979).

        Raises:
            ValueError: NaN or infinite values, which would stay in the moments for good.
        """
        batch = values.detach().cpu().double()
        if not batch.isfinite().all():
            n_bad = int((~batch.isfinite()).sum())
            raise ValueError(
                f"{n_bad} of {len(batch)} rewards are NaN or infinite and would spoil every later one; "
                "make the reward function return finite numbers"
            )
        if len(batch) == 0:
            return
        batch_mean = batch.mean().item()
        total = self.count + len(batch)
        difference = batch_mean - self.mean
        self.m2 += (batch - batch_mean).square().sum().item()
        self.m2 += difference**2 * self.count * len(batch) / total
        self.mean += difference * len(batch) / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased; 0 while fewer than two values were seen."""
        return (self.m2 / max(self.count - 1, 1)) ** 0.5

    def state_dict(self) -> dict[str, int | float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state_dict: dict[str, int | float]) -> None:
        self.count = int(state_dict["count"])
        self.mean = float(state_dict["mean"])
        self.m2 = float(state_dict["m2"])
