"""Mismatch between the rollout policy and a dense learner: overall and by layer."""

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.callbacks.diagnostic import RowsDiagnostic
from lit_rlkv.diagnostics import as_floats
from lit_rlkv.diagnostics.distributions import (
    evenly_spaced_rows,
    has_equal_views,
    layer_kls,
    view_overlap,
)
from lit_rlkv.diagnostics.importance_ratios import correction_statistics, dense_mismatch
from lit_rlkv.diagnostics.position_bins import (
    as_lists,
    log_ratios_by_position,
    overlap_tails,
    overlaps_by_position,
    prefixes_by_position,
)
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.packing import passes, unpacked


class DenseMismatch(RowsDiagnostic):
    """Mismatch of the rollout policy with a learner that sees every key, under any training method.

    With a dense learner, its log-probs are π_old. With replay, or where π_old is the sampler, they take one
    more forward. They also give the effect of each correction on the same rollout. Full distributions are
    compared on `n_rows` responses, with two more forwards of these. Without evictions no forward runs.
    Results cover all ranks.
    """

    name = "mismatch"
    budget: BudgetController | None = None
    """Gets the lowest of the overlaps' 5th percentiles by position."""

    def measure(self, experience: Experience) -> None:
        dense_logps = experience.ranks.all_gather(self._dense_logps(experience))
        overlap = experience.ranks.all_gather(self._overlap(experience))
        rollout = experience.all_gather().rollout
        response_mask = rollout.response_mask
        log_ratio = dense_logps - rollout.rollout_logps
        at_tokens = overlap[response_mask & ~overlap.isnan()]
        tails = overlap_tails(overlap, response_mask)
        if self.budget is not None:
            self.budget.update(float(min(tails.values())))
        self.scalars = as_floats(
            {
                **dense_mismatch(dense_logps, rollout.rollout_logps, response_mask),
                **correction_statistics(log_ratio, response_mask),
                "kv/overlap_mean": at_tokens.mean(),
                "kv/overlap_p05": at_tokens.quantile(0.05),
                **{f"kv/overlap_p05/{start}": tail for start, tail in tails.items()},
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
        """Return the log-probs of the response tokens for the policy that sampled, with every key visible."""
        rollout, old_logps = experience.rollout, experience.old_logps
        is_scored = old_logps is not rollout.rollout_logps  # False with correction.bypass_mode
        # A rank without evictions scores with the others, as the rows of one process do, and in their dtype.
        is_changed = experience.ranks.all_reduce_max(int(not has_equal_views(rollout)))
        if not is_changed or (is_scored and not self.policy.replays):
            return old_logps
        found = score_rollout(
            self.policy.roles,
            rollout,
            {"policy": False},
            temperature=self.policy.temperature,
            tokens_per_pass=self.tokens_per_pass,
        )
        return found["policy"]

    def _overlap(self, experience: Experience) -> Float[Tensor, "batch seq"]:
        """Return the overlap of the measured responses; NaN for the others."""
        rollout = experience.rollout
        rows = evenly_spaced_rows(rollout, self.n_rows, experience.ranks)
        sample = rollout.rows(rows)
        overlap = torch.full_like(rollout.rollout_logps, torch.nan)
        if has_equal_views(sample):
            overlap[rows] = sample.response_mask.to(overlap.dtype)
            return overlap
        with acting_as(self.policy.roles, "policy") as backbone:
            for places, part in passes(sample, self.tokens_per_pass):
                found = view_overlap(backbone, part, self.policy.temperature)
                overlap[rows[places]] = unpacked(found, sample.attention_mask, places).to(overlap.dtype)
        return overlap


class LayerMismatch(RowsDiagnostic):
    """KL from the dense policy to the policy with one layer's evictions, for each layer.

    Takes n_layers + 2 forwards of `n_rows` responses, chosen over all ranks. Without evictions all values are
    0 and no forward runs.
    """

    name = "layers"

    def measure(self, experience: Experience) -> None:
        rollout, ranks = experience.rollout, experience.ranks
        sample = rollout.rows(evenly_spaced_rows(rollout, self.n_rows, ranks))
        n_layers, device = rollout.record.evicted_at.shape[1], rollout.input_ids.device
        kls = torch.zeros(n_layers + 1, dtype=torch.float64, device=device)
        if not has_equal_views(sample):
            with acting_as(self.policy.roles, "policy") as backbone:
                for _, part in passes(sample, self.tokens_per_pass):
                    kls += layer_kls(backbone, part, self.policy.temperature).double().sum(dim=1)
        n_tokens = ranks.all_reduce_sum(sample.response_mask.sum())
        *by_layer, all_layers = (ranks.all_reduce_sum(kls) / n_tokens).tolist()
        self.scalars = {f"kv/layer_kl/{layer}": value for layer, value in enumerate(by_layer)}
        self.scalars["kv/layer_kl/all"] = all_layers
        self.arrays = {"layer_kl": by_layer, "all_layers_kl": all_layers}
