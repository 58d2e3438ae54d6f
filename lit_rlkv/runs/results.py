"""The results of a run so far, saved after each stage and loaded on resume."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lit_rlkv.evaluation.reward_model import RewardReport
from lit_rlkv.files import write_atomically
from lit_rlkv.runs.context import EVALUATION
from lit_rlkv.types import EvalRow, Rollout


@dataclass
class Results:
    """Evaluations before and after training, and the time that each stage took."""

    before: list[EvalRow] = field(default_factory=list)
    after: list[EvalRow] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the evaluation before training."""
    final: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation after training; empty before it."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    rollout: Rollout | None = None
    reward_model: RewardReport | None = None
    """Quality of the reward head on held-out pairs; None without one."""

    def save(self, run_dir: Path) -> None:
        """Write all but the rollout, atomically."""
        rows = {"before": [asdict(row) for row in self.before], "after": [asdict(row) for row in self.after]}
        judged = None if self.reward_model is None else asdict(self.reward_model)
        found = {
            **rows,
            "settings": self.settings,
            "final": self.final,
            "reward_model": judged,
            "stage_seconds": self.stage_seconds,
        }
        write_atomically(run_dir / EVALUATION, json.dumps(found, indent=1))

    @classmethod
    def load(cls, run_dir: Path) -> "Results":
        """Load the results of a run folder; empty results if there are none."""
        if not (run_dir / EVALUATION).is_file():
            return cls()
        saved = json.loads((run_dir / EVALUATION).read_text())
        return cls(
            before=[EvalRow(**row) for row in saved["before"]],
            after=[EvalRow(**row) for row in saved["after"]],
            settings=saved["settings"],
            final=saved["final"],
            stage_seconds=saved["stage_seconds"],
            reward_model=None if saved["reward_model"] is None else RewardReport(**saved["reward_model"]),
        )
