"""How far eviction moves the sampler from a dense learner, and what each correction would make of it."""

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.callbacks.diagnostic import RowsDiagnostic
from lit_rlkv.diagnostics.arms import arm_statistics
from lit_rlkv.diagnostics.mismatch import dense_mismatch
from lit_rlkv.diagnostics.positions import (
    as_lists,
    log_ratios_by_position,
    overlaps_by_position,
    prefixes_by_position,
)
from lit_rlkv.diagnostics.scalars import as_floats
from lit_rlkv.diagnostics.views import (
    in_passes,
    nothing_died,
    rows_in_pass,
    spread_rows,
    view_overlap,
)
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.models.hydra import acting_as


class Mismatch(RowsDiagnostic):
    """The sampler against a learner that sees every key, in whatever arm the run trains.

    Under a dense learner π_old is that learner already. Under replay one more forward asks what it would
    say, and tells what the other arms would have made of the same rollout. Where nothing was evicted no
    forward is run. Whole distributions are compared on a part of the responses, at the cost of two more
    forwards of them. On several ranks all of it is of the responses of all.
    """

    name = "mismatch"

    def measure(self, experience: Experience) -> None:
        dense_logps = experience.ranks.gather(self._dense_logps(experience))
        overlap = experience.ranks.gather(self._overlap(experience))
        rollout = experience.all_gather().rollout
        response_mask = rollout.response_mask
        log_ratio = dense_logps - rollout.rollout_logps
        at_actions = overlap[response_mask & ~overlap.isnan()]
        self.scalars = as_floats(
            {
                **dense_mismatch(dense_logps, rollout.rollout_logps, response_mask),
                **arm_statistics(log_ratio, response_mask),
                "kv/overlap_mean": at_actions.mean(),
                "kv/overlap_p05": at_actions.quantile(0.05),
            }
        )
        self.arrays = as_lists(
            {
                **log_ratios_by_position(log_ratio, response_mask),
                **prefixes_by_position(log_ratio, response_mask),
                **overlaps_by_position(overlap, response_mask),
            }
        )

    def _dense_logps(self, experience: Experience) -> Float[Tensor, "batch seq"]:
        """Log-probs of the actions for the policy as it sampled, with every key in sight."""
        rollout = experience.rollout
        if not self.policy.replays or nothing_died(rollout):
            return experience.old_logps
        found = score_rollout(
            self.policy.roles,
            rollout,
            {"policy": False},
            temperature=self.policy.temperature,
            rows_per_pass=rows_in_pass(rollout, self.rows_per_pass),
        )
        return found["policy"]

    def _overlap(self, experience: Experience) -> Float[Tensor, "batch seq"]:
        """Of the responses that are looked at; NaN at the others."""
        rollout = experience.rollout
        rows = spread_rows(rollout, self.n_rows, experience.ranks)
        some = rollout.rows(rows)
        overlap = torch.full_like(rollout.rollout_logps, torch.nan)
        if nothing_died(some):
            overlap[rows] = some.response_mask.to(overlap.dtype)
            return overlap
        with acting_as(self.policy.roles, "policy") as backbone:
            parts = [
                view_overlap(backbone, part, self.policy.temperature)
                for part in in_passes(some, self.rows_per_pass)
            ]
        overlap[rows] = torch.cat(parts).to(overlap.dtype)
        return overlap
