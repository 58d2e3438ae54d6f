"""GRPO and its relatives: a clipped surrogate on the advantages of a group."""

from typing import Any

from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.modules.clipped import check_clips, clipped_terms
from lit_rlkv.types import TrainBatch


class GRPO(PolicyModule):
    """−Σ weight·correction·min(ratio·A, clip(ratio)·A); A and the weights come with the batch.

    Args:
        clip_low, clip_high: the ratio π/π_old is kept within [1 − clip_low, 1 + clip_high] where that bounds
            the gain; infinity bounds nothing on its side.
    """

    required_options = ("clip_low", "clip_high")

    def __init__(self, *args: Any, clip_low: float, clip_high: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clip_low = clip_low
        self.clip_high = clip_high

    @classmethod
    def check_options(cls, **options: Any) -> None:
        check_clips(options, ("clip_low", "clip_high"))

    def objective(self, batch: TrainBatch, outputs: StepOutputs) -> tuple[Terms, Terms]:
        return clipped_terms(batch, outputs.logps, self.clip_low, self.clip_high)
