"""What was run, runs, and comes next: an Optuna study in the sweep's folder, which outlives kills."""

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
from lit_rlkv.sweeping.grid import combinations, only_adds
from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.parameters import Bounds, Parameter
from lit_rlkv.sweeping.plan import Plan, Run, by_key

STUDY = "study.db"
SEED = 0
"""Of what random and bayes draw; another sweep of the same file draws the same."""
MAX_NAME = 60
"""Characters of a folder's name that tell its values."""


class Ledger:
    """The runs of a sweep, in the order in which they were given out.

    A run is one folder. Its trial is the latest that has this folder: one that failed is given out again, in
    the same folder, by the next sweep that opens the ledger.
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
        """A run that was cut short or has failed before, or a new one; None when all have been given out."""
        if self._interrupted:
            return self._run_of(self._interrupted.pop(0))
        if self._failed:
            trial = self._failed.pop(0)
            self._enqueue(self._params(trial), {"folder": trial.user_attrs["folder"]})
        elif not self._is_waiting():
            if len(self._latest()) >= self.n_runs:
                return None
            if self._is_grid:
                self._enqueue(self._next_cell(), {})
        return self._ask()

    def _enqueue(self, drawn: dict[str, Any], attrs: dict[str, Any]) -> None:
        """A cell of a grid is an attribute: Optuna's own lists of choices can never gain one."""
        if self._is_grid:
            self._study.enqueue_trial({}, user_attrs={"cell": drawn} | attrs)
        else:
            self._study.enqueue_trial(drawn, user_attrs=attrs)

    def _ask(self) -> Run:
        self._study.sampler = self._sampler(len(self._study.trials))
        trial = self._study.ask({} if self._is_grid else self._spaces)
        if "folder" not in trial.user_attrs:
            drawn = self._params(self._study.trials[trial.number])
            trial.set_user_attr("folder", self._folder_name(trial.number, drawn))
        return self._run_of(self._study.trials[trial.number])

    def _is_waiting(self) -> bool:
        """Whether a kill came between queueing a run and giving it out."""
        return any(trial.state is TrialState.WAITING for trial in self._study.trials)

    def _next_cell(self) -> dict[str, Any]:
        known = [self._params(trial) for trial in self._study.trials]
        return next(drawn for drawn in combinations(self.plan.sweep) if drawn not in known)

    def finish(self, run: Run, outcome: Outcome) -> None:
        """Write down how a run ended."""
        trial = self._trial(run.number)
        trial.set_user_attr("outcome", asdict(outcome))
        self._tell(trial, outcome)

    def outcomes(self) -> Iterator[tuple[Run, Outcome]]:
        """The runs that have ended, each with how it did."""
        for trial in self._latest():
            if "outcome" in trial.user_attrs and trial.state.is_finished():
                yield self._run_of(trial), Outcome(**trial.user_attrs["outcome"])

    def _tell(self, trial: Trial, outcome: Outcome) -> None:
        """The sampler learns from a run that was stopped too: from its last value, and how far it came."""
        value = outcome.metrics.get(self.plan.sweep.metric.name)
        if outcome.state == "stopped" and outcome.history:
            trial.report(outcome.history[-1], len(outcome.history))
            self._study.tell(trial, state=TrialState.PRUNED)
        elif outcome.state == "finished" and value is not None and value == value:
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=TrialState.FAIL)

    def _check_same(self) -> None:
        sweep = self.plan.sweep
        parts = ("method", "metric", "parameters", "early_terminate", "command")
        described = {name: sweep.source.get(name) for name in parts} | {
            "overrides": by_key(self.plan.overrides)
        }
        known = self._study.user_attrs.get("sweep", described)
        changed = [name for name, value in described.items() if known.get(name) != value]
        is_other_grid = self._is_grid and changed == ["parameters"]
        if changed and not (is_other_grid and only_adds(known["parameters"], sweep)):
            added = "; a grid may gain values, and nothing else" if is_other_grid else ""
            raise ConfigError(
                f"{self.folder} holds a sweep with other {' and '.join(changed)}{added}; give another --dir, "
                "or remove it"
            )
        self._study.set_user_attr("sweep", described)

    def _latest(self) -> list[FrozenTrial]:
        """The last trial of each run; one whose draw was cut short by a kill is none."""
        latest: dict[str, FrozenTrial] = {}
        for trial in self._study.trials:
            if self._params(trial).keys() == self._spaces.keys():
                latest[self._name(trial)] = trial
        return list(latest.values())

    def _name(self, trial: FrozenTrial) -> str:
        name = trial.user_attrs.get("folder")
        return self._folder_name(trial.number, self._params(trial)) if name is None else str(name)

    def _params(self, trial: FrozenTrial) -> dict[str, Any]:
        """What was drawn, or is waiting to be."""
        waiting: dict[str, Any] = trial.system_attrs.get("fixed_params", {})
        cell: dict[str, Any] = trial.user_attrs.get("cell", {})
        return cell or trial.params or waiting

    def _run_of(self, trial: FrozenTrial) -> Run:
        values = self.plan.values(self._params(trial))
        return Run(trial.number, values, self.folder / self._name(trial))

    def _folder_name(self, number: int, drawn: dict[str, Any]) -> str:
        values = "-".join(str(value) for value in self.plan.values(drawn).values())
        return f"{number:04d}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', values)[:MAX_NAME]}"

    def _trial(self, number: int) -> Trial:
        return Trial(self._study, self._study.trials[number]._trial_id)

    def _sampler(self, n_drawn: int) -> optuna.samplers.BaseSampler:
        """Seeded anew for each draw: a sweep that goes on after a kill does not repeat its first ones."""
        seed = derive_seed(SEED, "sweep", n_drawn) % 2**32
        if self.plan.sweep.method == "bayes":
            return optuna.samplers.TPESampler(seed=seed)
        return optuna.samplers.RandomSampler(seed=seed)


def _has_failed(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.FAIL and trial.user_attrs["outcome"]["state"] == "failed"


def distribution(parameter: Parameter) -> BaseDistribution:
    """What Optuna calls the space of a parameter."""
    space = parameter.space
    if not isinstance(space, Bounds):
        return CategoricalDistribution(space)
    if space.is_whole:
        return IntDistribution(int(space.low), int(space.high))
    return FloatDistribution(space.low, space.high, log=space.is_log)
