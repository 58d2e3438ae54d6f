"""The budget of the rollouts' cache: fixed, or steered towards a target overlap (arXiv:2606.08446)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lit_rlkv.kvcache import CacheSpec

SHARE = 10
"""The budget changes by one of so many parts at a time, and by one key at least."""


class BudgetController:
    """Holds the cache of the next rollout; its budget is part of a checkpoint.

    A budget whose overlap is below `target` is raised by a tenth, and one whose overlap is above the middle
    between `target` and 1 is lowered by a tenth.

    Args:
        cache: the cache of the first rollout.
        target: overlap to keep; None: the budget stays as it is.
        bounds: smallest and largest budget; None: half and twice that of `cache`, but at least what its sink
            and window need.

    Raises:
        ValueError: the bounds are not two budgets of this cache with its own between them.
    """

    def __init__(
        self, cache: CacheSpec, target: float | int | None = None, bounds: Sequence[int] | None = None
    ) -> None:
        self.cache = cache
        self.target = target
        least = max(cache.budget // 2, cache.sink + cache.window + 1)
        self.bounds = (least, 2 * cache.budget) if bounds is None else tuple(bounds)
        if len(self.bounds) != 2 or not self.bounds[0] <= cache.budget <= self.bounds[1]:
            raise ValueError(
                "budget_bounds must be two budgets, the smaller one first, with "
                f"budget={cache.budget} between them, got {list(self.bounds)}; change them"
            )
        if bounds is not None:
            replace(cache, budget=self.bounds[0])  # which refuses one that is too small

    @property
    def controlled(self) -> int | None:
        """The budget if it is steered; None otherwise."""
        return None if self.target is None else self.cache.budget

    def update(self, overlap: float) -> None:
        """Set the budget of the next rollout from the overlap of the latest one."""
        if self.target is None:
            return
        budget, (least, most) = self.cache.budget, self.bounds
        step = max(budget // SHARE, 1)
        if overlap < self.target:
            budget += step
        elif overlap > (1 + self.target) / 2:
            budget -= step
        self.cache = replace(self.cache, budget=min(max(budget, least), most))

    def state_dict(self) -> dict[str, Any]:
        return {"budget": self.cache.budget}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.target is not None:
            self.cache = replace(self.cache, budget=state_dict["budget"])
