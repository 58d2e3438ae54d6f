"""Rollouts: generate() samples under a KV cache of fixed size and returns a Rollout that can be replayed."""

from lit_rlkv.rollout.generate import generate
from lit_rlkv.rollout.score_tokens import score_tokens
from lit_rlkv.types import Rollout

__all__ = ["Rollout", "generate", "score_tokens"]
