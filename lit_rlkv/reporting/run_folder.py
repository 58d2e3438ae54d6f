"""RunFolder: the contents of a run folder, for reports and comparisons; without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml

from lit_rlkv.checks import fits
from lit_rlkv.evaluation.results import EvalRow, Results, RewardReport
from lit_rlkv.files import check_yaml, json_lines, read_if_there, read_json, read_text
from lit_rlkv.reporting.describe import run_facts
from lit_rlkv.reporting.logged_samples import LoggedSample, read_samples
from lit_rlkv.reporting.run_metrics import History, read_metrics
from lit_rlkv.run_files import (
    CONFIG,
    DIAGNOSTICS,
    ENVIRONMENT,
    EVICTIONS,
    METRICS,
    SAMPLES,
    SFT_METRICS,
)

ENVIRONMENT_KINDS: dict[str, Any] = {
    "python": str,
    "packages": dict[str, str],
    "device": dict[str, Any] | None,
    "git": dict[str, Any] | None,
}
"""Types of those entries of a start that the report and the model card read."""


@dataclass(frozen=True)
class RunFolder:
    """Contents of the folder of a run, finished or not; the report leaves out what is empty or None."""

    title: str
    config_yaml: str = ""
    environments: Sequence[Mapping[str, Any]] = ()
    """The entries of environment.json, one for each start."""
    history: History = ()
    sft_history: History = ()
    before: Sequence[EvalRow] = ()
    after: Sequence[EvalRow] = ()
    evictions: Mapping[str, Any] | None = None
    """The `eviction_record` of an evaluation rollout under the budget."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[LoggedSample] = ()
    reward_model: RewardReport | None = None
    """Quality of the reward head on held-out pairs."""
    diagnostics: Sequence[Mapping[str, Any]] = ()
    """The lines of diagnostics.jsonl."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config in plain types."""
        return yaml.safe_load(self.config_yaml) or {}

    @property
    def budget(self) -> int | None:
        """Budget of the run's own cache; None if it is dense."""
        cache = self.config.get("cache", {})
        return None if cache.get("policy") == "dense" else cache.get("budget")

    @property
    def last_evaluation(self) -> Sequence[EvalRow]:
        """Rows of the evaluation after training, or of the one before it if there is no other."""
        return self.after or self.before

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the run by heading."""
        return run_facts(self.config, self.environments, self.stage_seconds)

    def measured(self, name: str) -> list[Mapping[str, Any]]:
        """Return the lines of one diagnostic in the order of iterations."""
        return [row for row in self.diagnostics if row["name"] == name]


def read_run(run_dir: Path) -> RunFolder:
    """Read a run folder; files that the run has not written yet count as empty.

    Raises:
        DamagedFileError: a file does not hold what a run writes.
    """
    run_dir = run_dir.absolute()
    results = Results.load(run_dir)
    return RunFolder(
        title=run_dir.name,
        config_yaml=read_if_there(run_dir / CONFIG, _yaml, ""),
        environments=read_if_there(run_dir / ENVIRONMENT, read_environments, []),
        history=read_if_there(run_dir / METRICS, read_metrics, []),
        sft_history=read_if_there(run_dir / SFT_METRICS, read_metrics, []),
        evictions=read_if_there(run_dir / EVICTIONS, _evictions, None),
        samples=read_if_there(run_dir / SAMPLES, read_samples, []),
        diagnostics=read_if_there(run_dir / DIAGNOSTICS, _diagnostics, []),
        before=results.before,
        after=results.after,
        stage_seconds=results.stage_seconds,
        reward_model=results.reward_model,
    )


def read_environments(path: Path) -> list[dict[str, Any]]:
    """Return the entries of environment.json, one for each start.

    Raises:
        ValueError: the file does not hold them.
    """
    starts = read_json(path)
    if not fits(starts, list[dict[str, Any]]):
        raise ValueError("it must be a list of objects")
    for key, kind in ENVIRONMENT_KINDS.items():
        if not all(fits(start.get(key), kind) for start in starts):
            raise ValueError(f"{key} does not have the type that a run writes")
    return cast("list[dict[str, Any]]", starts)


def _yaml(path: Path) -> str:
    """Return the text of a YAML file that holds a mapping."""
    text = read_text(path)
    try:
        check_yaml(text)
        config = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(config, dict):
        raise ValueError("it must be a mapping")
    return text


def _evictions(path: Path) -> dict[str, Any]:
    saved = read_json(path)
    if not (isinstance(saved, dict) and "lifetimes" in saved):
        raise ValueError("it must be an object with lifetimes")
    return saved


def _diagnostics(path: Path) -> list[dict[str, Any]]:
    rows = json_lines(path)
    if not all(isinstance(row, dict) and {"iteration", "name"} <= row.keys() for row in rows):
        raise ValueError("every line must be an object with iteration and name")
    return rows
