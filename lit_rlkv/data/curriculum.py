"""Curriculum: problems drawn by how often their responses succeed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.types import Prompt

UNSEEN = 0.5
"""Success rate of a problem that was never drawn: such problems are drawn as often as any."""


def success_weights(rates: Float[Tensor, " problem"], floor: float | int) -> Float[Tensor, " problem"]:
    """Return p (1 − p) + floor for the success rate p of each problem.

    p (1 − p) is the variance of a reward of 0 or 1: the largest at 1/2, and 0 where all responses of a group
    are right or all are wrong, which gives no gradient (arXiv:2504.03380).
    """
    return rates * (1 - rates) + floor


class Curriculum:
    """Success rates of problems, by their prompts, and draws by the weights of these rates.

    Args:
        prompts: those of all problems; equal ones share a rate.
        decay: share of the old rate in the new one when a problem is drawn again.
        floor: see `success_weights`.
    """

    def __init__(self, prompts: Sequence[Prompt], decay: float | int, floor: float | int) -> None:
        self._decay = decay
        self._floor = floor
        self._rates = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
        """NaN for problems that were never drawn."""
        self._places: dict[Prompt, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            self._places[prompt].append(place)

    def draw(self, n: int, generator: torch.Generator) -> list[int]:
        """Return the places of `n` problems, all different unless there are fewer."""
        weights = success_weights(self._rates.nan_to_num(nan=UNSEEN), self._floor)
        places = torch.multinomial(weights, n, replacement=n > len(weights), generator=generator)
        return [int(place) for place in places]

    def update(self, successes: Iterable[tuple[Prompt, float]]) -> None:
        """Move the rate of each problem towards the mean success of its responses, the first time onto it."""
        found: dict[Prompt, list[float]] = defaultdict(list)
        for prompt, success in successes:
            found[prompt].append(success)
        for prompt, values in found.items():
            places, mean = self._places[prompt], sum(values) / len(values)
            old = self._rates[places].nan_to_num(nan=mean)
            self._rates[places] = self._decay * old + (1 - self._decay) * mean

    def metrics(self) -> dict[str, float]:
        """Return the share of problems that were drawn so far, and their mean success rate."""
        seen = self._rates[~self._rates.isnan()]
        return {
            "curriculum/drawn": len(seen) / len(self._rates),
            "curriculum/success": float(seen.sum()) / max(len(seen), 1),
        }

    def state_dict(self) -> list[tuple[int, float]]:
        """Return places and rates of the problems that were drawn."""
        places = (~self._rates.isnan()).nonzero().flatten()
        return list(zip(places.tolist(), self._rates[places].tolist(), strict=True))

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restore the rates, of the same prompts."""
        self._rates.fill_(torch.nan)
        for place, rate in state:
            self._rates[int(place)] = rate
