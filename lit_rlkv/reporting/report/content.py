"""What a report is about: all that a run measured, and what it gained in a sentence or two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rlkv.evaluation.reward_model import RewardReport
from lit_rlkv.reporting import plots
from lit_rlkv.reporting.samples import Sample
from lit_rlkv.types import EvalRow, Rollout


@dataclass(frozen=True)
class RunReport:
    """All that the page shows; what a run did not do is empty or None, and its section is left out."""

    title: str
    config_yaml: str
    history: plots.History
    before: list[EvalRow]
    after: list[EvalRow]
    rollout: Rollout | None
    """An evaluation rollout under the budget."""
    budget: int | None
    """Of the run's own cache; None if it is dense."""
    interval: int | None
    stage_seconds: dict[str, float]
    samples: list[Sample]
    versions: dict[str, str]
    reward_model: RewardReport | None = None
    """What the reward head is worth on held-out pairs."""
    token_labels: Mapping[int, str] | None = None
    """What to write for each token id beside the key lifetimes."""
    diagnostics: Sequence[Mapping[str, Any]] = ()
    """The lines of diagnostics.jsonl."""

    def measured(self, name: str) -> list[Mapping[str, Any]]:
        """What a diagnostic has written, in the order of iterations."""
        return [row for row in self.diagnostics if row["name"] == name]


def headline(report: RunReport) -> list[str]:
    """What the run achieved, in one sentence or two."""
    sentences = [_accuracy_sentence(report)] if report.before or report.after else []
    _, reward = plots.series(report.history, "reward")
    if len(reward):
        n_averaged = min(plots.SMOOTHING, max(len(reward) // 2, 1))
        first, last = reward[:n_averaged].mean(), reward[-n_averaged:].mean()
        over = f"over {len(reward)} iterations" if len(reward) > 1 else "in one iteration"
        change = f"{first:.2f} → {last:.2f}" if len(reward) > 1 else f"{last:.2f}"
        sentences.append(f"Mean reward of the rollouts {over}: {change}.")
    return sentences or ["This run neither trained nor evaluated a policy."]


def _accuracy_sentence(report: RunReport) -> str:
    dense = _gain(report, None)
    sparse = "" if report.budget is None else _gain(report, report.budget)
    if not sparse:
        return f"Accuracy with a dense cache: {dense}." if dense else "The run's own cache was not evaluated."
    under = f"Accuracy under a budget of {report.budget} keys: {sparse}"
    return f"{under}; dense: {dense}." if dense else f"{under}."


def _gain(report: RunReport, budget: int | None) -> str:
    """`0.46 → 0.81`, or the one number there is, or nothing."""
    found = [row.accuracy for rows in (report.before, report.after) for row in rows if row.budget == budget]
    return " → ".join(f"{accuracy:.2f}" for accuracy in found)
