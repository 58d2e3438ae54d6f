"""Shadow attention: what the learner computes so that it sees what the sampler saw."""

from lit_rlkv.kernels.shadow_attention.reference import shadow_attention, visible

__all__ = ["shadow_attention", "visible"]
