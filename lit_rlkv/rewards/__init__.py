"""From completions to rewards."""

from lit_rlkv.rewards.verifier import score

__all__ = ["score"]
