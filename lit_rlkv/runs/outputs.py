"""RunOutputs: the metrics, samples, logger and report of a training run."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields, replace
from functools import partial
from typing import Any, cast

from lightning import Callback
from omegaconf import OmegaConf

from lit_rlkv.callbacks.diagnostic import DiagnosticsFile
from lit_rlkv.callbacks.reference_sync import ReferenceSync
from lit_rlkv.callbacks.reward_watch import RewardWatch
from lit_rlkv.callbacks.rollout_statistics import RolloutStatistics
from lit_rlkv.config import as_config_errors
from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.files import write_atomically
from lit_rlkv.reporting.eviction_record import eviction_record
from lit_rlkv.reporting.loggers import GuardedLogger, LoggingCallback, RunLogger, RunStart
from lit_rlkv.reporting.loggers.lightning_loggers import as_run_logger
from lit_rlkv.reporting.metrics_file import MetricsFile, RunAxes
from lit_rlkv.reporting.pictures import Picture, figures
from lit_rlkv.reporting.progress import ProgressBar
from lit_rlkv.reporting.report import render
from lit_rlkv.reporting.run_folder import RunFolder, read_run
from lit_rlkv.reporting.run_metrics import SECONDS, last_axis_values
from lit_rlkv.reporting.samples import Samples
from lit_rlkv.rewards import MathVerify
from lit_rlkv.run_files import EVICTIONS, METRICS, REPORT
from lit_rlkv.runs import environment
from lit_rlkv.runs.run import Run
from lit_rlkv.types import Rollout

log = logging.getLogger(__name__)


class RunOutputs:
    """Metrics, samples, logger and report of a run that has begun; the context manager `open` opens them.

    Raises:
        ConfigError: the logger's settings are wrong.
    """

    def __init__(self, run: Run) -> None:
        cfg, keep = run.cfg, run.cfg.callbacks
        self.run = run
        self.logger = start_logger(run)
        self.progress = ProgressBar("iteration", run.console, cfg.algorithm.n_iterations, run.resumed_at)
        last = {} if run.resume_from is None else run.resume_from.metrics
        # The checkpoint holds the metrics of rank 0.
        self.metrics = MetricsFile(
            run.own_folder / METRICS, run.resumed_at, last if run.is_rank_zero else None
        )
        self.samples = Samples(
            run.own_folder,
            n=keep.n_samples,
            every_n_iterations=keep.samples_every,
            console=run.console,
            accuracy=cfg.accuracy,
            resumed_at=run.resumed_at,
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the logger and the reward workers."""
        with self.run.rewards, self.logger, self.run.smaller_passes_after_failure():
            yield

    def callbacks(self) -> list[Callback]:
        """Return all callbacks in calling order: those that add metrics first, those that show them last."""
        run, parts, sync = self.run, self.run.parts, self.run.cfg.algorithm.reference_sync
        functions = run.rewards.functions.values()
        watch = RewardWatch(reads_all_forms=any(isinstance(function, MathVerify) for function in functions))
        return [
            RolloutStatistics(None if parts.correction.samples_dense else parts.cache),
            *([watch] if run.resumed_at == 0 else []),
            RunAxes(self.metrics.history),
            *parts.diagnostics,
            DiagnosticsFile(run.own_folder, parts.diagnostics, run.resumed_at),
            *([] if parts.distillation is None else [parts.distillation]),
            *parts.user_callbacks,
            *([] if sync.every is None else [ReferenceSync(sync.every, sync.alpha)]),
            self.metrics,
            LoggingCallback(self.logger, self.samples, self.metrics.history, self._draw),
            self.samples,
            self.progress,
        ]

    def keep_trained_seconds(self) -> None:
        """Count the training time that the metrics file knows of: a killed process saved no stage time."""
        trained_s = last_axis_values(self.metrics.history)[SECONDS]
        seconds = self.run.results.stage_seconds
        seconds["rl"] = max(seconds["rl"], trained_s)
        self.run.save_results()

    def write_report(self) -> None:
        """Write report.html and send the outcome to the logger; only rank 0 does."""
        run = self.run
        if run.is_rank_zero:
            self._save_evictions()
            report = self._report()
            pictures = figures(report)
            write_atomically(run.folder / REPORT, render(report, pictures))
        run.interruption.is_finished = True
        if run.is_rank_zero:
            self.logger.send("the outcome", lambda logger: self._log_outcome(logger, pictures))
        run.fabric.barrier()

    def _log_outcome(self, logger: RunLogger, pictures: Sequence[Picture]) -> None:
        results, place = self.run.results, last_axis_values(self.metrics.history)
        rows = [
            *(["before", *astuple(row)] for row in results.before),
            *(["after", *astuple(row)] for row in results.after),
        ]
        if rows:
            logger.table("evaluation", ("when", *(column.name for column in fields(EvalRow))), rows, place)
        if results.final:
            logger.scalars(results.final, place)
        if pictures:
            logger.figures(pictures, place)
        logger.file(self.run.folder / REPORT, "report")
        checkpoint = self.run.checkpoints.latest()
        if checkpoint is not None:
            logger.file(checkpoint.path, "model")

    def _save_evictions(self) -> None:
        """Write what the report shows of the evaluation rollout; a failure costs a figure, not the run."""
        rollout = self.run.results.rollout
        if rollout is None:
            return
        try:
            write_atomically(self.run.folder / EVICTIONS, json.dumps(self._eviction_record(rollout)))
        except Exception as error:
            log.warning("the report has no key lifetimes: %s", error)

    def _draw(self, rollout: Rollout) -> list[Picture]:
        return figures(replace(self._report(), evictions=self._eviction_record(rollout)))

    def _report(self) -> RunFolder:
        """Return what the report shows of the run so far; a full disk may have kept rows out of the file."""
        return replace(read_run(self.run.folder), history=self.metrics.history)

    def _eviction_record(self, rollout: Rollout) -> dict[str, Any]:
        decode = self.run.tokenizer.decode
        return eviction_record(rollout, lambda token: cast(str, decode([token])))


def start_logger(run: Run) -> GuardedLogger:
    """Record the environment of the run and build its logger, both on rank 0; a `with` block opens it.

    Raises:
        ConfigError: the logger's settings are wrong.
    """
    found = environment.describe(run.cfg, run.fabric.device)
    logger: RunLogger | None = None
    if run.is_rank_zero:
        environment.record(run.folder, found)
        if (built := run.parts.logger) is not None:
            with as_config_errors("logger"):
                if isinstance(built, partial):  # one of Lightning's loggers, which needs the run's folder
                    built = built(**{"save_dir": run.folder, **built.keywords})
                logger = as_run_logger(built)
    config = cast("dict[str, Any]", OmegaConf.to_container(run.cfg.source))
    return GuardedLogger(logger, RunStart(run.folder, config, found, run.resumed_at), run.console)
