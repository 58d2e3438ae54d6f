"""A training run in progress: its folder, its results so far, its callbacks and its report."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning import Callback
from omegaconf import OmegaConf
from rich.console import Console

from lit_rlkv.callbacks.diagnostic import Diagnostic, DiagnosticsFile
from lit_rlkv.callbacks.reference_sync import ReferenceSync
from lit_rlkv.callbacks.reward_watch import RewardWatch
from lit_rlkv.callbacks.rollout_statistics import RolloutStatistics
from lit_rlkv.checks import from_json
from lit_rlkv.config import AUTO, as_config_errors, require
from lit_rlkv.evaluation.results import EvalRow, RewardReport
from lit_rlkv.files import atomic_dir, link_tree, read_if_there, read_json, write_atomically
from lit_rlkv.interrupts import Interruption
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.reporting.eviction_record import eviction_record
from lit_rlkv.reporting.loggers import GuardedLogger, LoggingCallback, RunLogger, RunStart
from lit_rlkv.reporting.loggers.lightning_loggers import as_run_logger
from lit_rlkv.reporting.metrics_file import MetricsFile, RunAxes
from lit_rlkv.reporting.pictures import Picture, figures
from lit_rlkv.reporting.progress import ProgressBar, say
from lit_rlkv.reporting.report import render
from lit_rlkv.reporting.run_folder import RunReport, read_run
from lit_rlkv.reporting.run_metrics import SECONDS, last_axis_values
from lit_rlkv.reporting.samples import Samples
from lit_rlkv.rewards import MathVerify
from lit_rlkv.run_files import BACKBONE, CHECKPOINTS, CONFIG, EVALUATION, EVICTIONS, METRICS, REPORT
from lit_rlkv.runs import environment
from lit_rlkv.runs.checkpoint import CheckpointDir, RetentionPolicy
from lit_rlkv.runs.context import RunContext
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.runs.pass_size import halve_pass_limit
from lit_rlkv.runs.resume import config_to_save, has_lost_checkpoints, warn_of_other_ranks
from lit_rlkv.runs.starting_model import SFT_DONE
from lit_rlkv.types import Rollout

log = logging.getLogger(__name__)
RANKS = "ranks"
"""Folder in a run for the metrics of ranks other than 0."""


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
    rollout: Rollout | None = None

    def save(self, run_dir: Path) -> None:
        """Write all but the rollout, atomically."""
        found = asdict(replace(self, rollout=None))
        del found["rollout"]
        write_atomically(run_dir / EVALUATION, json.dumps(found, indent=1))

    @classmethod
    def load(cls, run_dir: Path) -> "Results":
        """Load the results of a run folder; empty results if there are none.

        Raises:
            DamagedFileError: the file cannot be read.
        """
        return read_if_there(run_dir / EVALUATION, cls._read, cls())

    @classmethod
    def _read(cls, path: Path) -> "Results":
        saved = read_json(path)
        for when in ("before", "after"):
            saved[when] = [from_json(EvalRow, row) for row in saved[when]]
        if saved["reward_model"] is not None:
            saved["reward_model"] = from_json(RewardReport, saved["reward_model"])
        return from_json(cls, saved)


class TrainingRun:
    """The folder of a run on every rank, with its results, metrics, logger and callbacks.

    The constructor reads the newest checkpoint and earlier results, and rank 0 writes the config. The context
    manager `open` opens and closes the logger and the reward workers.

    Args:
        run_dir: folder of the run, the same on all ranks.
        console: console on which rank 0 prints.

    Raises:
        ConfigError: all checkpoints of the folder are broken, or the logger's settings are wrong.
    """

    def __init__(
        self, context: RunContext, run_dir: Path, console: Console, interruption: Interruption
    ) -> None:
        cfg, fabric = context.cfg, context.fabric
        self.context = context
        self.run_dir = run_dir
        self.console = console
        self.interruption = interruption
        self.is_rank_zero = fabric.is_global_zero
        keep = cfg.callbacks
        retention = RetentionPolicy(keep.keep_last, keep.keep_best, keep.best_metric, keep.best_mode)
        self.checkpoints = CheckpointDir(run_dir / CHECKPOINTS, retention)
        self.resume_from = broadcast_from_rank_zero(fabric, self.checkpoints.latest)
        if self.resume_from is not None:
            say(console, f"resume after iteration {self.resume_from.iteration} of {run_dir}")
            warn_of_other_ranks(self.resume_from, fabric.world_size)
        self.resumed_at = 0 if self.resume_from is None else self.resume_from.iteration
        broadcast_from_rank_zero(fabric, self._check_rows)
        fabric.barrier()  # every rank has read the folder before rank 0 writes to it
        if self.is_rank_zero:
            run_dir.mkdir(parents=True, exist_ok=True)
            saved = config_to_save(cfg.source, run_dir)
            write_atomically(run_dir / CONFIG, OmegaConf.to_yaml(saved))
        self.logger = start_logger(context, run_dir, self.resumed_at, console)
        self.own_dir = run_dir if self.is_rank_zero else run_dir / RANKS / str(fabric.global_rank)
        self.own_dir.mkdir(parents=True, exist_ok=True)
        self.progress = ProgressBar("iteration", console, cfg.algorithm.n_iterations, self.resumed_at)
        self.results = broadcast_from_rank_zero(fabric, lambda: Results.load(run_dir))
        self.metrics = MetricsFile(self.own_dir / METRICS, self.resumed_at, self._last_metrics())
        self.samples = Samples(
            self.own_dir,
            n=keep.n_samples,
            every_n_iterations=keep.samples_every,
            console=console,
            accuracy=cfg.accuracy,
            resumed_at=self.resumed_at,
        )

    def _last_metrics(self) -> Mapping[str, float] | None:
        """Return what the checkpoint holds of rank 0's metrics; None on other ranks."""
        if not self.is_rank_zero:
            return None
        return {} if self.resume_from is None else self.resume_from.metrics

    def _check_rows(self) -> None:
        """Refuse to begin again a run whose checkpoints are gone: its metrics would be overwritten."""
        require(
            not has_lost_checkpoints(self.run_dir, self.context.cfg),
            f"{self.run_dir} has metrics of iterations that were trained, and no checkpoint; restore its "
            f"folder {CHECKPOINTS}, or remove {METRICS} to train from the start",
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the logger and the reward workers."""
        with self.context.rewards, self.logger:
            try:
                yield
            except MemoryExhaustedError as error:
                is_auto = self.context.cfg.fabric.tokens_per_pass == AUTO
                if is_auto and error.tokens_per_pass is not None:
                    halve_pass_limit(self.run_dir, error.tokens_per_pass)
                raise

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to a stage and save the results, also if the block fails."""
        seconds, started_at = self.results.stage_seconds, time.perf_counter()
        try:
            yield
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started_at
            self.save_results()

    def save_results(self, *, must_succeed: bool = False) -> None:
        """Write the results so far. A full disk costs a warning; the last save tries again."""
        if not self.is_rank_zero:
            return
        try:
            self.results.save(self.run_dir)
        except OSError as error:
            if must_succeed:
                raise
            log.warning("%s in %s cannot be written: %s", EVALUATION, self.run_dir, error)

    def keep_trained_seconds(self) -> None:
        """Count the training time that the metrics file knows of: a killed process saved no stage time."""
        trained_s = last_axis_values(self.metrics.history)[SECONDS]
        seconds = self.results.stage_seconds
        seconds["rl"] = max(seconds["rl"], trained_s)
        self.save_results()

    def keep_backbone(self, start: Path) -> None:
        """Link the SFT model into the run, so that it survives a clean-up of the shared folder."""
        is_sft_model = (start / SFT_DONE).is_file()
        if self.is_rank_zero and is_sft_model and not (self.run_dir / BACKBONE / SFT_DONE).is_file():
            with atomic_dir(self.run_dir / BACKBONE) as partial:
                link_tree(start, partial)
        self.context.fabric.barrier()

    def callbacks(self) -> list[Callback]:
        """Return all callbacks in calling order: those that add metrics first, those that show them last."""
        parts, sync = self.context.cfg.parts, self.context.cfg.algorithm.reference_sync
        functions = self.context.rewards.functions.values()
        watch = RewardWatch(reads_all_forms=any(isinstance(function, MathVerify) for function in functions))
        return [
            RolloutStatistics(None if parts.correction.samples_dense else parts.cache),
            *([watch] if self.resumed_at == 0 else []),
            RunAxes(self.metrics.history),
            *parts.diagnostics,
            DiagnosticsFile(self.own_dir, parts.diagnostics, self.resumed_at),
            *([] if parts.distillation is None else [parts.distillation]),
            *parts.user_callbacks,
            *([] if sync.every is None else [ReferenceSync(sync.every, sync.alpha)]),
            self.metrics,
            LoggingCallback(self.logger, self.samples, self.metrics.history, self._draw),
            self.samples,
            self.progress,
        ]

    def write_report(self) -> None:
        """Write report.html and send the outcome to the logger; only rank 0 does."""
        if self.is_rank_zero:
            self._save_evictions()
            report = self._report()
            pictures = figures(report)
            write_atomically(self.run_dir / REPORT, render(report, pictures))
        self.interruption.is_finished = True
        if self.is_rank_zero:
            self.logger.send("the outcome", lambda logger: self._log_outcome(logger, pictures))
        self.context.fabric.barrier()

    def _log_outcome(self, logger: RunLogger, pictures: Sequence[Picture]) -> None:
        results, place = self.results, last_axis_values(self.metrics.history)
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
        logger.file(self.run_dir / REPORT, "report")
        checkpoint = self.checkpoints.latest()
        if checkpoint is not None:
            logger.file(checkpoint.path, "model")

    def _save_evictions(self) -> None:
        """Write what the report shows of the evaluation rollout; a failure costs a figure, not the run."""
        if self.results.rollout is None:
            return
        try:
            record = json.dumps(self._eviction_record(self.results.rollout))
            write_atomically(self.run_dir / EVICTIONS, record)
        except Exception as error:
            log.warning("the report has no key lifetimes: %s", error)

    def _draw(self, rollout: Rollout) -> list[Picture]:
        return figures(replace(self._report(), evictions=self._eviction_record(rollout)))

    def _report(self) -> RunReport:
        """Return what the report shows of the run so far; a full disk may have kept rows out of the file."""
        return replace(read_run(self.run_dir), history=self.metrics.history)

    def _eviction_record(self, rollout: Rollout) -> dict[str, Any]:
        decode = self.context.tokenizer.decode
        return eviction_record(rollout, lambda token: cast(str, decode([token])))


def try_diagnostics(diagnostics: Sequence[Diagnostic], module: PolicyModule) -> None:
    """Let each diagnostic see the policy, so that one that cannot measure it fails before training.

    Raises:
        ConfigError: a diagnostic cannot measure this policy.
    """
    with as_config_errors("diagnostics"):
        for diagnostic in diagnostics:
            diagnostic.on_fit_start(None, module)


def start_logger(context: RunContext, run_dir: Path, resumed_at: int, console: Console) -> GuardedLogger:
    """Record the environment of the run and build its logger, both on rank 0; a `with` block opens it.

    Raises:
        ConfigError: the logger's settings are wrong.
    """
    cfg = context.cfg
    found = environment.describe(cfg, context.fabric.device)
    logger: RunLogger | None = None
    if context.fabric.is_global_zero:
        environment.record(run_dir, found)
        if (built := cfg.parts.logger) is not None:
            with as_config_errors("logger"):
                if isinstance(built, partial):  # one of Lightning's loggers, which needs the run's folder
                    built = built(**{"save_dir": run_dir, **built.keywords})
                logger = as_run_logger(built)
    config = cast("dict[str, Any]", OmegaConf.to_container(cfg.source))
    return GuardedLogger(logger, RunStart(run_dir, config, found, resumed_at), console)
