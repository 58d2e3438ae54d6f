"""Results of a run's evaluations as plain numbers, without torch: rows, intervals, reward model, file."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_rlkv.checks import from_json
from lit_rlkv.files import read_if_there, read_json, write_atomically
from lit_rlkv.run_files import EVALUATION

N_BINS = 10
"""Number of equally wide bins of confidence for the calibration error."""


@dataclass(frozen=True)
class EvalRow:
    """Scores of a policy on held-out prompts with one cache."""

    cache: str
    """Name of the cache: "dense", or policy and size."""
    budget: int | None
    """Keys kept per sequence, layer and KV head; None: all."""
    accuracy: float | None
    """Share of responses with full score; None where nothing says what is correct."""
    n_problems: int
    mean_length: float
    """Tokens per response."""
    kv_bytes: int
    """Allocated bytes of keys and values, of the whole batch.

    The latest queries that SnapKV, R-KV and expected attention also keep are not counted:
    window · group / (2 · slots) of these bytes, where `group` query heads share a KV head.
    """
    kl: float
    """KL(μ ‖ dense learner) per token in nats, estimated on sampled tokens: the mismatch by eviction."""
    replay_gap: float
    """max |log π(shadow) − log μ| over all response tokens: rounding error if replay is exact."""
    learned_reward: float | None = None
    """Mean score of the reward role; None without one."""
    reward: float | None = None
    """Mean reward, as of training's rollouts; None if every reward failed, and in older files."""
    affected: float | None = None
    """Share of responses that lost keys; None in older files."""
    perplexity: float | None = None
    """Of the texts of `evaluation.perplexity`: exp of the mean −log p of their tokens; None without texts."""


@dataclass(frozen=True)
class IntervalEstimate:
    """A mean with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class CacheEstimates:
    """Means over the problems, with their intervals."""

    accuracy: IntervalEstimate | None
    """None where nothing says what is correct."""
    reward: IntervalEstimate | None
    """None if every reward failed."""
    mean_length: IntervalEstimate
    """Tokens per response."""
    pass_at_k: dict[int, IntervalEstimate]


@dataclass(frozen=True)
class RewardReport:
    """Quality of a reward head on held-out pairs.

    The confidence that the first of two completions is better is σ(r_first − r_second), the model of Bradley
    and Terry. Every pair is scored in both orders, so confidence can be too high or too low.
    """

    n_pairs: int
    pair_accuracy: float
    """Share of pairs whose chosen side has the higher reward; a tie counts as wrong."""
    margin_mean: float
    """Mean of r_better − r_worse."""
    margin_std: float
    """Population standard deviation of r_better − r_worse; 0 for a single pair."""
    calibration_error: float
    """Expected calibration error: mean |accuracy − confidence| over bins, weighted by counts."""
    bin_confidence: list[float]
    """Mean confidence of each non-empty bin, ascending."""
    bin_accuracy: list[float]
    """Share of comparisons whose first side is better, in the same bins."""
    bin_counts: list[int]
    """Number of comparisons in the same bins, two for each pair."""


@dataclass
class Results:
    """Evaluations before and after training, and the time that each stage took."""

    before: list[EvalRow] = field(default_factory=list)
    after: list[EvalRow] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the evaluation before training."""
    final: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation after training; empty before it."""
    reward_model: RewardReport | None = None
    """Quality of the reward head on held-out pairs; None without one."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    rollout: Any = None
    """Rollout of the latest evaluation under the run's own budget; not saved."""

    def save(self, folder: Path) -> None:
        """Write all but the rollout into a run folder, atomically."""
        found = asdict(replace(self, rollout=None))
        del found["rollout"]
        write_atomically(folder / EVALUATION, json.dumps(found, indent=1))

    @classmethod
    def load(cls, folder: Path) -> "Results":
        """Load the results of a run folder; empty results if there are none.

        Raises:
            DamagedFileError: the file cannot be read.
        """
        return read_if_there(folder / EVALUATION, cls._read, cls())

    @classmethod
    def _read(cls, path: Path) -> "Results":
        saved = read_json(path)
        for when in ("before", "after"):
            saved[when] = [from_json(EvalRow, row) for row in saved[when]]
        if saved["reward_model"] is not None:
            saved["reward_model"] = from_json(RewardReport, saved["reward_model"])
        return from_json(cls, saved)
