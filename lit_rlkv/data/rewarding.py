"""One reward for each response: verifier and reward model weighed, normalised, clipped; cut responses pay."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.rewards.shaping import (
    STD_FLOOR,
    RunningMoments,
    clip_rewards,
    missing_eos_penalty,
    normalise_batch,
)
from lit_rlkv.types import Rewards

NORMALISATIONS = ("none", "batch", "running")


@dataclass(frozen=True)
class RewardConfig:
    """What a response earns.

    Raises:
        ValueError: a reward of nothing, or a normalisation that does not exist.
    """

    verifier: float | int = 1.0
    """Weight of the task's own score."""
    learned: float | int = 0.0
    """Weight of the reward role's score; 0 leaves the role out."""
    normalize: str = "none"
    """`batch`: mean 0 and std 1 over the iteration; `running`: over all rewards so far."""
    clip: float | int | None = None
    """Bound on the size of the normalised reward."""
    missing_eos_penalty: float | int = 0.0
    """Taken off a response that was cut at the longest length allowed, after all else."""

    def __post_init__(self) -> None:
        if self.verifier == 0 and self.learned == 0:
            raise ValueError("verifier=0 and learned=0 leave no reward; give one of them a weight")
        if self.normalize not in NORMALISATIONS:
            raise ValueError(
                f"normalize={self.normalize!r} is unknown; choose one of {', '.join(NORMALISATIONS)}"
            )
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip} leaves no reward; give more than 0, or null for none")


class RewardRule:
    """Applies a `RewardConfig`; what it remembers from one iteration to the next is in its state."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.moments = RunningMoments()

    def __call__(
        self, components: Mapping[str, Float[Tensor, " batch"]], has_eos: Bool[Tensor, " batch"]
    ) -> Rewards:
        """The total from the components, which are kept as they are for the logs.

        Raises:
            ValueError: a component that has a weight is not there.
        """
        config = self.config
        weights = {"verifier": ("exact_match", config.verifier), "learned": ("learned", config.learned)}
        for option, (name, weight) in weights.items():
            if weight != 0 and name not in components:
                raise ValueError(
                    f"{option}={weight} weighs a score that this run does not have; give it weight 0, or a "
                    "task with a verifier and a reward role"
                )
        parts = [weight * components[name] for name, weight in weights.values() if weight != 0]
        total = sum(parts[1:], start=parts[0])
        if config.normalize == "batch":
            total = normalise_batch(total)
        elif config.normalize == "running":
            self.moments.update(total)
            total = (total - self.moments.mean) / (self.moments.std + STD_FLOOR)
        total = missing_eos_penalty(clip_rewards(total, config.clip), has_eos, config.missing_eos_penalty)
        return Rewards(total=total, components=dict(components))

    def state_dict(self) -> dict[str, Any]:
        return self.moments.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.moments.load_state_dict(state_dict)
