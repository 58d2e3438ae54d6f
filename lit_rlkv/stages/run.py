"""A run under way: warm-up, evaluation, RL, evaluation; each leaves what it found in the folder."""

import logging
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lit_rlkv.callbacks.diagnostic import FILE_NAME as DIAGNOSTICS
from lit_rlkv.callbacks.diagnostic import Diagnostic, DiagnosticsFile, read_rows
from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.callbacks.rollout_statistics import RolloutStatistics
from lit_rlkv.config import as_config_errors, build
from lit_rlkv.faults import Interruption
from lit_rlkv.files import atomic_dir, link_tree
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.reporting.axes import SECONDS, RunAxes, place_of
from lit_rlkv.reporting.final import final_metrics
from lit_rlkv.reporting.loggers import GuardedLogger
from lit_rlkv.reporting.logging_callback import LoggingCallback
from lit_rlkv.reporting.metrics_file import MetricsFile
from lit_rlkv.reporting.progress import ProgressBar
from lit_rlkv.reporting.report import Picture, RunReport, figures, write_report
from lit_rlkv.reporting.samples import Samples
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir, load_trainable
from lit_rlkv.runs.context import BACKBONE, EVALUATION, METRICS, REPORT, RunContext
from lit_rlkv.runs.environment import installed
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.results import Results
from lit_rlkv.runs.run_logger import log_outcome
from lit_rlkv.runs.saver import backbone_id, check_backbone
from lit_rlkv.runs.sft_progress import SFTProgress
from lit_rlkv.runs.starting_model import SFT_DONE
from lit_rlkv.stages.evaluation import evaluate_policy, report_on_reward
from lit_rlkv.stages.rl import train_policy
from lit_rlkv.stages.sft import run_sft
from lit_rlkv.types import EvalRow, Rollout

log = logging.getLogger(__name__)
SFT_WORK = "warmup"
"""Folder in a run for what its warm-up has done so far."""
RANKS = "ranks"
"""Folder in a run for the metrics of each rank but the first."""


class Run:
    """The stages of a run, from the last checkpoint on; all ranks go through them together.

    Args:
        run_dir: that of all ranks.
        resume_from: the checkpoint to go on from; None begins.
        console: where the first rank says what it does.
    """

    def __init__(
        self,
        parts: RunContext,
        run_dir: Path,
        checkpoints: CheckpointDir,
        resume_from: Checkpoint | None,
        logger: GuardedLogger,
        console: Console,
        interruption: Interruption,
    ) -> None:
        self.parts = parts
        self.run_dir = run_dir
        self.checkpoints = checkpoints
        self.resume_from = resume_from
        self.logger = logger
        self.console = console
        self.interruption = interruption
        self.is_first = parts.fabric.is_global_zero
        self.own_dir = run_dir if self.is_first else run_dir / RANKS / str(parts.fabric.global_rank)
        self.own_dir.mkdir(parents=True, exist_ok=True)
        self.results = broadcast_from_rank_zero(parts.fabric, lambda: Results.load(run_dir))
        self.resumed_at = 0 if resume_from is None else resume_from.iteration
        self.metrics = MetricsFile(self.own_dir / METRICS, self.resumed_at)
        shown = parts.cfg.callbacks
        self.samples = Samples(
            self.own_dir, n=shown.n_samples, every_n_iterations=shown.samples_every, console=console
        )

    def go(self, start: str | Path | None) -> Results:
        """All stages that the config asks for.

        Args:
            start: the model to start from; None warms one up.
        """
        # One rank that ends would leave the others waiting: all agree to, where they ask each other.
        with self.interruption.held(self.parts.fabric.world_size > 1):
            return self._stages(start)

    def _stages(self, start: str | Path | None) -> Results:
        cfg, results = self.parts.cfg, self.results
        trains, evaluates = "rl" in cfg.stages, "eval" in cfg.stages
        start = self._warm_up() if start is None else self._start_from(start)
        module = make_policy(self.parts, start)
        # Not sooner: a model of the hub is in the cache now.
        backbone = broadcast_from_rank_zero(self.parts.fabric, lambda: backbone_id(start))
        check_backbone(self.resume_from, start, backbone)
        diagnostics = make_diagnostics(cfg, module)
        self.interruption.end_if_asked(self.parts.fabric)
        if evaluates and results.reward_model is None:
            with self._timed("eval"):
                results.reward_model = report_on_reward(self.parts, module.roles, start)
        if evaluates and (trains or self.resume_from is not None):
            self._evaluate_start(module)
        if trains:
            self.interruption.end_if_asked(self.parts.fabric)  # before it samples for an iteration
            self._train(module, diagnostics, backbone)
        elif self.resume_from is not None:
            with as_config_errors(str(self.resume_from.path)):
                load_trainable(module, self.resume_from.weights())
        if evaluates:
            self.console.print("[bold]eval[/]" + (" after training" if trains else ""))
            with self._timed("eval"):
                results.after, results.rollout = self._evaluate(module)
            budget = None if self.parts.cache.is_dense else self.parts.cache.budget
            results.final = final_metrics(results.before, results.after, budget)
            self._save_results()
        if self.is_first:
            self._report()
        self.parts.fabric.barrier()
        return results

    def _evaluate_start(self, module: PolicyModule) -> None:
        """Of the model that training starts from, again where it was evaluated in another way."""
        results, asked = self.results, self.parts.cfg.evaluation
        settings = cast(dict[str, Any], OmegaConf.to_container(asked, resolve=True))
        settings.pop("batch_size")  # decides on nothing that is found
        if results.before and results.settings in ({}, settings):
            return
        self.console.print("[bold]eval[/] before training")
        with self._timed("eval"):
            results.before, results.rollout = self._evaluate(module)
            results.settings = settings

    def _evaluate(self, module: PolicyModule) -> tuple[list[EvalRow], Rollout | None]:
        return evaluate_policy(self.parts, module.roles, self.interruption)

    def _start_from(self, start: str | Path) -> str | Path:
        self.console.print(f"start from {start}")
        self._keep_backbone(Path(start))
        return start

    def _warm_up(self) -> Path:
        self.console.print("[bold]sft[/] warm up a model by supervised fine-tuning (kept for later runs)")
        with self._timed("sft"):
            every = self.parts.cfg.callbacks.checkpoint_every
            work = self.run_dir / SFT_WORK
            progress = SFTProgress(self.parts.fabric, work, every)
            callbacks = [
                ProgressBar("sft", self.console),
                MetricsFile(self.own_dir / "sft_metrics.csv", progress.resumed_at),
            ]
            start = run_sft(self.parts, callbacks, progress, self.interruption)
        self._keep_backbone(start)
        return start

    def _keep_backbone(self, start: Path) -> None:
        if self.is_first:
            keep_backbone(start, self.run_dir)
        self.parts.fabric.barrier()

    def _train(self, module: PolicyModule, diagnostics: Sequence[Diagnostic], backbone: str) -> None:
        self.console.print(f"[bold]rl[/] {self.parts.cfg.algorithm.n_iterations} iterations")
        with self._timed("rl"):
            train_policy(
                self.parts,
                module,
                self.callbacks(diagnostics),
                self.checkpoints,
                self.resume_from,
                self.interruption,
                backbone,
            )
        # A run that was killed could not write down how long it had trained.
        trained_s = place_of(self.metrics.history)[SECONDS]
        self.results.stage_seconds["rl"] = max(self.results.stage_seconds["rl"], trained_s)
        self._save_if_possible()

    def callbacks(self, diagnostics: Sequence[Diagnostic]) -> list[RLCallback]:
        """In the order in which they are called: what adds to the metrics first, what shows them last."""
        distillation = self.parts.cfg.distillation
        logging_callback = LoggingCallback(self.logger, self.samples, self.metrics.history, self._draw)
        return [
            RolloutStatistics(),
            RunAxes(self.metrics.history),
            *diagnostics,
            DiagnosticsFile(self.own_dir, diagnostics, self.resumed_at),
            *([] if distillation is None else [build(distillation)]),
            self.metrics,
            logging_callback,
            self.samples,
            ProgressBar(console=self.console),
        ]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage and writes down what is known, also where it is cut short."""
        seconds, started_at = self.results.stage_seconds, time.perf_counter()
        try:
            yield
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started_at
            self._save_if_possible()

    def _save_results(self) -> None:
        if self.is_first:
            self.results.save(self.run_dir)

    def _save_if_possible(self) -> None:
        """A full disk costs a warning and hides nothing that ended a stage; the last save makes up for it."""
        try:
            self._save_results()
        except OSError as error:
            log.warning("%s in %s cannot be written: %s", EVALUATION, self.run_dir, error)

    def _draw(self, rollout: Rollout) -> list[Picture]:
        """The figures of the run so far."""
        results = replace(self.results, rollout=rollout)
        return figures(make_report(self.parts, results, self.metrics, self.samples, self.run_dir))

    def _report(self) -> None:
        report = make_report(self.parts, self.results, self.metrics, self.samples, self.run_dir)
        pictures = figures(report)
        write_report(self.run_dir / REPORT, report, pictures)
        log_outcome(
            self.logger,
            {"before": self.results.before, "after": self.results.after},
            self.results.final,
            pictures,
            place_of(self.metrics.history),
            self.run_dir / REPORT,
            self.checkpoints.latest(),
        )


def make_diagnostics(cfg: DictConfig, module: PolicyModule) -> list[Diagnostic]:
    """Those of the config, each of which has met the policy.

    Raises:
        ConfigError: one of them cannot measure this policy, which would else be known when training starts.
    """
    diagnostics: list[Diagnostic] = [build(node) for node in cfg.diagnostics.values() if node is not None]
    with as_config_errors("diagnostics"):
        for diagnostic in diagnostics:
            diagnostic.on_fit_start(None, module)
    return diagnostics


def keep_backbone(start: Path, run_dir: Path) -> None:
    """Link a warmed-up backbone into the run, so that its checkpoints outlive the warm folder."""
    if (start / SFT_DONE).is_file() and not (run_dir / BACKBONE / SFT_DONE).is_file():
        with atomic_dir(run_dir / BACKBONE) as partial:
            link_tree(start, partial)


def make_report(
    parts: RunContext, results: Results, metrics: MetricsFile, samples: Samples, run_dir: Path
) -> RunReport:
    """What the report shows of a run so far, finished or not."""
    cfg, rollout = parts.cfg, results.rollout
    seen = [] if rollout is None else sorted(set(rollout.input_ids.flatten().tolist()))
    packages = ("torch", "transformers", "peft", "lightning")
    return RunReport(
        title=run_dir.name,
        config_yaml=OmegaConf.to_yaml(cfg, resolve=True),
        history=metrics.history,
        before=results.before,
        after=results.after,
        rollout=rollout,
        token_labels={token: cast(str, parts.tokenizer.decode([token])) for token in seen},
        budget=None if cfg.cache.policy == "dense" else cfg.cache.budget,
        interval=None if cfg.cache.policy == "dense" else cfg.cache.interval,
        reward_model=results.reward_model,
        stage_seconds=results.stage_seconds,
        samples=samples.samples,
        diagnostics=read_rows(run_dir / DIAGNOSTICS),
        versions={"python": platform.python_version(), **installed(packages)},
    )
