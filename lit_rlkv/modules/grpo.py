"""GRPO and its variants (Dr. GRPO, DAPO, RLOO, REINFORCE++): the clipped surrogate on group advantages."""

from lit_rlkv.modules.clipped import ClippedPolicy


class GRPO(ClippedPolicy):
    """The clipped surrogate alone; the variants differ in advantage, aggregation and clipping options."""
