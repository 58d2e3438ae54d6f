"""The KL coefficient β: fixed, or adapted to a target KL per response (arXiv:1909.08593)."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.config.schema import KLConfig
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.objectives.kl import MAX_ERROR, adapted_weight, k1, kl_penalty
from lit_rlkv.objectives.reduction import masked_sum


class KLController:
    """Holds the KL coefficient of the current iteration; its state is part of a checkpoint.

    Args:
        n_responses: responses of all ranks in an iteration.

    Raises:
        ValueError: the horizon is so short that the coefficient could become negative.
    """

    def __init__(self, config: KLConfig, n_responses: int) -> None:
        if config.target is not None and not config.horizon > MAX_ERROR * n_responses:
            raise ValueError(
                f"algorithm.kl.horizon={config.horizon} steers too fast for {n_responses} responses an "
                f"iteration; give more than {MAX_ERROR * n_responses:.0f}"
            )
        self.config = config
        self.coef = config.weight

    def penalty(
        self,
        old_logps: Float[Tensor, "batch seq"],
        ref_logps: Float[Tensor, "batch seq"] | None,
        response_mask: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "batch seq"]:
        """Return β·KL of each response token if the KL is part of the reward; otherwise zeros."""
        if ref_logps is None or self.config.place != "reward":
            return torch.zeros_like(old_logps)
        return kl_penalty(self.config.estimator, old_logps, ref_logps, response_mask, self.coef)

    def update(
        self,
        old_logps: Float[Tensor, "batch seq"],
        ref_logps: Float[Tensor, "batch seq"] | None,
        response_mask: Bool[Tensor, "batch seq"],
        ranks: Ranks,
    ) -> None:
        """Set the coefficient of the next iteration from the KL of all ranks' responses."""
        target = self.config.target
        if target is None or ref_logps is None:
            return
        sums = ranks.all_gather(masked_sum(k1(old_logps, ref_logps), response_mask)[None])
        n = len(old_logps) * ranks.size
        kl = float(sums.sum()) / n
        self.coef = adapted_weight(self.coef, kl, n, target=target, horizon=self.config.horizon)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coef = state_dict["coef"]
