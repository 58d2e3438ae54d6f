"""The runs of a sweep that have ended, run, and come next: an Optuna study in the sweep's folder.

Optuna draws by TPE for `bayes` and uniformly for `random`. The storage is SQLite, not Optuna's journal file:
a kill in the middle of a write leaves half a line there, and the study can be read no more. A grid is listed
here, as Optuna's own GridSampler can never gain a value.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from lit_rlkv.config import ConfigError
from lit_rlkv.rng import derive_seed
from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.parameters import Parameter, combinations, parse_parameters
from lit_rlkv.sweeping.plan import Plan, Run, by_key
from lit_rlkv.sweeping.sweep_file import Sweep

STUDY = "study.db"
SEED = 0
"""Seed of random and bayes; another sweep of the same file draws the same."""
MAX_NAME = 60
"""Characters of a folder's name that show its values."""


class SweepStudy:
    """The runs of a sweep, in the order in which they were started.

    A run is one folder, and the latest trial with this folder. A failed run is started again, in the same
    folder, by the next process that opens the study.
    """

    def __init__(self, plan: Plan, folder: Path, n_runs: int) -> None:
        """Open the study in a folder, or begin one.

        Raises:
            ConfigError: the folder holds a sweep of other runs.
        """
        self.plan = plan
        self.folder = folder
        self.n_runs = n_runs
        self._is_grid = plan.sweep.method == "grid"
        self._spaces = {parameter.name: distribution(parameter) for parameter in plan.sweep.parameters}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self._study = optuna.create_study(
            storage=f"sqlite:///{(folder / STUDY).resolve()}",
            study_name="sweep",
            direction=StudyDirection[plan.sweep.metric.goal.upper()],
            load_if_exists=True,
        )
        self._check_same()
        self._interrupted = [trial for trial in self._latest() if trial.state is TrialState.RUNNING]
        self._failed = [trial for trial in self._latest() if _has_failed(trial)]

    def next_run(self) -> Run | None:
        """Return an interrupted run, a failed one, or a new one; None if none is left."""
        if self._interrupted:
            return self._run_of(self._interrupted.pop(0))
        if self._failed:
            trial = self._failed.pop(0)
            self._enqueue(self._params(trial), {"folder": trial.user_attrs["folder"]})
        elif not any(trial.state is TrialState.WAITING for trial in self._study.trials):
            if len(self._latest()) >= self.n_runs:
                return None
            if self._is_grid:
                known = [self._params(trial) for trial in self._study.trials]
                cells = combinations(self.plan.sweep.parameters, "grid")
                self._enqueue(next(drawn for drawn in cells if drawn not in known), {})
        return self._ask()

    def finish(self, run: Run, outcome: Outcome) -> None:
        """Record how a run ended; the sampler also learns from the last value of a stopped run."""
        trial = Trial(self._study, self._study.trials[run.number]._trial_id)
        trial.set_user_attr("outcome", asdict(outcome))
        value = outcome.metrics.get(self.plan.sweep.metric.name)
        if outcome.state == "stopped" and outcome.history:
            trial.report(outcome.history[-1], len(outcome.history))
            self._study.tell(trial, state=TrialState.PRUNED)
        elif outcome.state == "finished" and value is not None and value == value:
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=TrialState.FAIL)

    def outcomes(self) -> Iterator[tuple[Run, Outcome]]:
        """Yield the runs that have ended, with their outcomes."""
        for trial in self._latest():
            if "outcome" in trial.user_attrs and trial.state.is_finished():
                yield self._run_of(trial), Outcome(**trial.user_attrs["outcome"])

    def _enqueue(self, drawn: dict[str, Any], attrs: dict[str, Any]) -> None:
        if self._is_grid:
            self._study.enqueue_trial({}, user_attrs={"cell": drawn} | attrs)
        else:
            self._study.enqueue_trial(drawn, user_attrs=attrs)

    def _ask(self) -> Run:
        # Seeded anew for each draw, so that a sweep that is resumed does not repeat its first ones.
        seed = derive_seed(SEED, "sweep", len(self._study.trials)) % 2**32
        samplers = optuna.samplers
        is_bayes = self.plan.sweep.method == "bayes"
        self._study.sampler = (
            samplers.TPESampler(seed=seed) if is_bayes else samplers.RandomSampler(seed=seed)
        )
        trial = self._study.ask({} if self._is_grid else self._spaces)
        frozen = self._study.trials[trial.number]
        if "folder" not in trial.user_attrs:
            trial.set_user_attr("folder", self._folder_name(frozen))
        return self._run_of(self._study.trials[trial.number])

    def _check_same(self) -> None:
        sweep = self.plan.sweep
        parts = ("method", "metric", "parameters", "early_terminate", "command")
        described = {name: sweep.source.get(name) for name in parts} | {
            "overrides": by_key(self.plan.overrides)
        }
        known = self._study.user_attrs.get("sweep", described)
        changed = [name for name, value in described.items() if known.get(name) != value]
        is_other_grid = self._is_grid and changed == ["parameters"]
        if changed and not (is_other_grid and _only_adds_values(known["parameters"], sweep)):
            added = "; a grid may gain values, and nothing else" if is_other_grid else ""
            raise ConfigError(
                f"{self.folder} holds a sweep with other {' and '.join(changed)}{added}; give another --dir, "
                "or remove it"
            )
        self._study.set_user_attr("sweep", described)

    def _latest(self) -> list[FrozenTrial]:
        """Return the last trial of each run, without those whose draw was cut short by a kill."""
        latest: dict[str, FrozenTrial] = {}
        for trial in self._study.trials:
            if self._params(trial).keys() == self._spaces.keys():
                latest[self._name(trial)] = trial
        return list(latest.values())

    def _name(self, trial: FrozenTrial) -> str:
        return str(trial.user_attrs.get("folder") or self._folder_name(trial))

    def _params(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the draw of a trial, also of one that waits to be started."""
        waiting: dict[str, Any] = trial.system_attrs.get("fixed_params", {})
        cell: dict[str, Any] = trial.user_attrs.get("cell", {})
        return cell or trial.params or waiting

    def _run_of(self, trial: FrozenTrial) -> Run:
        values = self.plan.values(self._params(trial))
        return Run(trial.number, values, self.folder / self._name(trial))

    def _folder_name(self, trial: FrozenTrial) -> str:
        values = "-".join(str(value) for value in self.plan.values(self._params(trial)).values())
        return f"{trial.number:04d}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', values)[:MAX_NAME]}"


def _has_failed(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.FAIL and trial.user_attrs["outcome"]["state"] == "failed"


def _only_adds_values(before: Any, sweep: Sweep) -> bool:
    """True if a grid has the same parameters and constants as before, and all values that it had."""
    varied, constants = parse_parameters(before)
    was = {parameter.name: parameter.grid() for parameter in varied}
    now = {parameter.name: parameter.grid() for parameter in sweep.parameters}
    is_same = constants == sweep.constants and was.keys() == now.keys()
    return is_same and all(set(values) <= set(now[name]) for name, values in was.items())


def distribution(parameter: Parameter) -> BaseDistribution:
    """Return Optuna's distribution of a parameter's draws."""
    if parameter.kind == "categorical":
        return CategoricalDistribution(parameter.labels)
    if parameter.kind == "int_uniform":
        return IntDistribution(int(parameter.low), int(parameter.high))
    return FloatDistribution(parameter.low, parameter.high, log=parameter.draws_log)
