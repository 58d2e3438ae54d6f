"""How a run of a sweep is started: afresh, from its last checkpoint, or not at all where it runs already."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lit_rlkv.stages.warmup import start_folder, warm_folder
from lit_rlkv.sweeping.job import FitJob, Job, can_resume, is_finished, is_worked_in
from lit_rlkv.sweeping.plan import Plan, Run, folder_override, quoted


class Launcher(ABC):
    """Starts the runs of a sweep."""

    @abstractmethod
    def launch(self, run: Run) -> Job: ...

    def must_wait(self, run: Run, running: Sequence[Run]) -> bool:
        """Whether a run would only repeat work that another is about to leave for it."""
        return False


class FitLauncher(Launcher):
    """Starts fit, each run in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._configs: dict[int, DictConfig] = {}

    def launch(self, run: Run) -> Job:
        folder = run.folder
        if is_worked_in(folder) or is_finished(folder):
            return FitJob(folder)  # of an earlier sweep that was killed
        if can_resume(folder):
            return FitJob.start(folder, [f"resume={quoted(folder)}", folder_override(folder)])
        shutil.rmtree(folder, ignore_errors=True)
        return FitJob.start(folder, self.plan.arguments(run.values, folder))

    def must_wait(self, run: Run, running: Sequence[Run]) -> bool:
        """Runs share their warm models, so only one of those that need the same makes it."""
        warm = self._warm_model_to_make(run)
        return warm is not None and any(self._warm_model_to_make(other) == warm for other in running)

    def _warm_model_to_make(self, run: Run) -> Path | None:
        if run.number not in self._configs:
            self._configs[run.number] = self.plan.compose(run.values, run.folder).cfg
        cfg = self._configs[run.number]
        return warm_folder(cfg) if start_folder(cfg, run.folder) is None else None
