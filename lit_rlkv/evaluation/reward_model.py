"""Accuracy and calibration of a reward head on held-out pairs."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.demonstrations import DemonstrationBatch, dense_hidden, encode_completions
from lit_rlkv.evaluation.results import N_BINS, RewardReport
from lit_rlkv.models.heads import ScalarHead, last_token
from lit_rlkv.types import PreferencePair

ALMOST_ONE = 1 - torch.finfo(torch.float64).eps
"""Highest confidence; torchmetrics would give exactly 1 a bin of its own."""


def score_pairs(
    backbone: PreTrainedModel,
    head: ScalarHead,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[PreferencePair],
    batch_size: int,
    *,
    on_scored: Callable[[int], object] | None = None,
) -> RewardReport:
    """Score both sides of each pair in full, with the backbone's active role.

    Args:
        batch_size: pairs at a time.
        on_scored: called after each batch with its number of pairs.

    Raises:
        ValueError: there are no pairs, or a reward is not finite.
    """
    if not pairs:
        raise ValueError("there are no pairs to score; give at least one")
    margins = []
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        margins.append(_margins(backbone, head, tokenizer, batch))
        if on_scored is not None:
            on_scored(len(batch))
    return report_margins(torch.cat(margins))


@torch.no_grad()
def _margins(
    backbone: PreTrainedModel,
    head: ScalarHead,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[PreferencePair],
) -> Float[Tensor, " pair"]:
    """Return r_better − r_worse of each pair."""

    def rewards(completions: Sequence[str]) -> Float[Tensor, " pair"]:
        batch: DemonstrationBatch = encode_completions(tokenizer, [p.prompt for p in pairs], completions)
        batch = batch.to(backbone.device)
        return head(last_token(dense_hidden(backbone, batch), batch.attention_mask)).cpu().double()

    return rewards([p.chosen for p in pairs]) - rewards([p.rejected for p in pairs])


def report_margins(margins: Float[Tensor, " pair"]) -> RewardReport:
    """Return the report for margins r_better − r_worse.

    Raises:
        ValueError: a margin is not finite.
    """
    n_pairs, n_broken = len(margins), int((~margins.isfinite()).sum())
    if n_broken:
        raise ValueError(
            f"{n_broken} of {n_pairs} pairs have rewards that are not finite, so training diverged; lower "
            "the learning rate of the SFT stage and train again"
        )
    margins = margins.cpu().double()
    confidence = torch.cat([margins, -margins]).sigmoid().clamp(max=ALMOST_ONE)
    is_first_better = torch.arange(2 * n_pairs) < n_pairs
    calibration = BinaryCalibrationError(N_BINS, norm="l1")(confidence, is_first_better.long())
    bin_confidence, bin_accuracy, bin_counts = _bins(confidence, is_first_better.double())
    return RewardReport(
        n_pairs=n_pairs,
        pair_accuracy=float((margins > 0).double().mean()),
        margin_mean=float(margins.mean()),
        margin_std=float(margins.std(correction=0)),
        calibration_error=float(calibration),
        bin_confidence=bin_confidence,
        bin_accuracy=bin_accuracy,
        bin_counts=bin_counts,
    )


def _bins(
    confidence: Float[Tensor, " comparison"], is_right: Float[Tensor, " comparison"]
) -> tuple[list[float], list[float], list[int]]:
    """Return mean confidence, accuracy and count of the non-empty bins; lower edges are inclusive."""
    edges = torch.linspace(0, 1, N_BINS + 1, dtype=confidence.dtype)
    place = torch.bucketize(confidence, edges, right=True) - 1
    counts = torch.bincount(place, minlength=N_BINS)
    is_used = counts > 0
    sums = [torch.bincount(place, weights=values, minlength=N_BINS) for values in (confidence, is_right)]
    mean_confidence, accuracy = ((total[is_used] / counts[is_used]).tolist() for total in sums)
    return mean_confidence, accuracy, counts[is_used].tolist()
