"""Models: backbones with our attention, roles, and replay of a rollout."""

from lit_rlkv.models.preparation import prepare_backbone
from lit_rlkv.models.replay import eviction_delays, replay_logps

__all__ = ["eviction_delays", "prepare_backbone", "replay_logps"]
