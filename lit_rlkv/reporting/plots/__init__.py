"""Pictures of a run: pure functions from what was measured to matplotlib figures, without pyplot."""

from lit_rlkv.reporting.plots.arms import effective_samples
from lit_rlkv.reporting.plots.cache import cache_fill, live_keys, queries
from lit_rlkv.reporting.plots.evaluation import accuracy_against_budget
from lit_rlkv.reporting.plots.history import SMOOTHING, History, series
from lit_rlkv.reporting.plots.image import pixels
from lit_rlkv.reporting.plots.layers import layer_mismatch
from lit_rlkv.reporting.plots.lifetimes import MAX_LABELLED_TOKENS, key_lifetimes
from lit_rlkv.reporting.plots.phases import has_memory, memory_per_phase, time_per_phase
from lit_rlkv.reporting.plots.positions import (
    mismatch_by_position,
    overlap_by_position,
    weights_by_position,
)
from lit_rlkv.reporting.plots.retention import ages_at_eviction, attention_kept, attention_on_dead
from lit_rlkv.reporting.plots.reward import proxy_and_gold, reliability
from lit_rlkv.reporting.plots.speed import time_per_stage
from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    GRID,
    HALF_WIDTH,
    INK,
    MUTED,
    PURPLE,
    SAND,
    VERMILLION,
)
from lit_rlkv.reporting.plots.training import MISMATCHES, mismatch, reward_curve

__all__ = [
    "BLUE",
    "FULL_WIDTH",
    "GREEN",
    "GRID",
    "HALF_WIDTH",
    "INK",
    "MAX_LABELLED_TOKENS",
    "MISMATCHES",
    "MUTED",
    "PURPLE",
    "SAND",
    "SMOOTHING",
    "VERMILLION",
    "History",
    "accuracy_against_budget",
    "ages_at_eviction",
    "attention_kept",
    "attention_on_dead",
    "cache_fill",
    "effective_samples",
    "has_memory",
    "key_lifetimes",
    "layer_mismatch",
    "live_keys",
    "memory_per_phase",
    "mismatch",
    "mismatch_by_position",
    "overlap_by_position",
    "pixels",
    "proxy_and_gold",
    "queries",
    "reliability",
    "reward_curve",
    "series",
    "time_per_phase",
    "time_per_stage",
    "weights_by_position",
]
