"""python -m lit_rlkv.fit: compose the config, build the parts, run the stages, write the report."""

import json
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lit_rlkv.callbacks.axes import RunAxes, place_of
from lit_rlkv.callbacks.diagnostic import FILE_NAME as DIAGNOSTICS
from lit_rlkv.callbacks.diagnostic import Diagnostic, DiagnosticsFile, read_rows
from lit_rlkv.callbacks.final import final_metrics
from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.callbacks.loggers import GuardedLogger
from lit_rlkv.callbacks.logging_callback import LoggingCallback
from lit_rlkv.callbacks.metrics_file import MetricsFile
from lit_rlkv.callbacks.progress import ProgressBar, stderr_console
from lit_rlkv.callbacks.report import Picture, RunReport, figures, write_report
from lit_rlkv.callbacks.samples import Samples
from lit_rlkv.callbacks.statistics import RolloutStatistics
from lit_rlkv.callbacks.summary import summary_table
from lit_rlkv.checkpoint import Checkpoint, CheckpointDir, load_trainable
from lit_rlkv.config import (
    CONF_DIR,
    ConfigError,
    as_config_errors,
    build,
    check_command_line,
    check_config,
    check_keys,
)
from lit_rlkv.data.reward_evaluation import RewardReport
from lit_rlkv.files import write_atomically
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.stages.environment import installed
from lit_rlkv.stages.evaluation import evaluate_policy
from lit_rlkv.stages.parts import (
    BACKBONE,
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    METRICS,
    REPORT,
    Parts,
    build_parts,
    load_config,
)
from lit_rlkv.stages.recording import log_outcome, start_logger
from lit_rlkv.stages.reward import report_on_reward
from lit_rlkv.stages.training import make_policy, train_policy
from lit_rlkv.stages.warmup import WARM_DONE, start_folder, warm_up
from lit_rlkv.types import EvalRow, Rollout

LOG = "fit.log"

log = logging.getLogger(__name__)


@dataclass
class Results:
    """What the run has found so far; written down after each stage, read back on resume."""

    before: list[EvalRow] = field(default_factory=list)
    after: list[EvalRow] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    """The numbers that the run is judged by, once it has been evaluated after training."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    rollout: Rollout | None = None
    reward_model: RewardReport | None = None
    """What the reward head is worth on held-out pairs; None where there is none."""

    def save(self, run_dir: Path) -> None:
        rows = {"before": [asdict(row) for row in self.before], "after": [asdict(row) for row in self.after]}
        judged = None if self.reward_model is None else asdict(self.reward_model)
        found = {
            **rows,
            "final": self.final,
            "reward_model": judged,
            "stage_seconds": self.stage_seconds,
        }
        write_atomically(run_dir / EVALUATION, json.dumps(found, indent=1))

    @classmethod
    def load(cls, run_dir: Path) -> "Results":
        if not (run_dir / EVALUATION).is_file():
            return cls()
        saved = json.loads((run_dir / EVALUATION).read_text())
        return cls(
            before=[EvalRow(**row) for row in saved["before"]],
            after=[EvalRow(**row) for row in saved["after"]],
            stage_seconds=saved["stage_seconds"],
            reward_model=None if saved.get("reward_model") is None else RewardReport(**saved["reward_model"]),
        )

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage."""
        started_at = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started_at
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + elapsed_s


def fit(cfg: DictConfig, run_dir: Path, console: Console, *, resumes: bool = False) -> Results:
    """Run the stages of a checked config in a folder that holds everything the run leaves behind.

    Raises:
        ConfigError: the folder holds a run already and this one does not resume it.
    """
    if not resumes and (run_dir / CONFIG).exists():
        raise ConfigError(
            f"{run_dir} holds a run already; give resume={run_dir} to go on with it, or another folder"
        )
    start = start_folder(cfg, run_dir)
    parts = build_parts(cfg)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / CONFIG, OmegaConf.to_yaml(cfg, resolve=True))
    checkpoints = CheckpointDir(run_dir / CHECKPOINTS)
    resume_from = checkpoints.latest()
    resumed_at = 0 if resume_from is None else resume_from.iteration
    with start_logger(parts, run_dir, resumed_at, console) as logger:
        return run_stages(parts, run_dir, start, checkpoints, logger, console)


def run_stages(
    parts: Parts,
    run_dir: Path,
    start: str | Path | None,
    checkpoints: CheckpointDir,
    logger: GuardedLogger,
    console: Console,
) -> Results:
    """Warm-up, evaluation, RL and evaluation, as the config says, from the last checkpoint on."""
    cfg = parts.cfg
    results = Results.load(run_dir)
    resume_from = checkpoints.latest()
    if start is None:
        console.print("[bold]sft[/] warm up a model by supervised fine-tuning (kept for later runs)")
        with results.timed("sft"):
            start = warm_up(parts, [ProgressBar("sft"), MetricsFile(run_dir / "sft_metrics.csv")])
    else:
        console.print(f"start from {start}")
    keep_backbone(Path(start), run_dir)

    module = make_policy(parts, start)
    diagnostics = make_diagnostics(cfg, module)
    metrics = MetricsFile(run_dir / METRICS, resumed_at=0 if resume_from is None else resume_from.iteration)
    samples = Samples(run_dir, n=cfg.callbacks.n_samples, every_n_iterations=cfg.callbacks.samples_every)
    trains, evaluates = "rl" in cfg.stages, "eval" in cfg.stages
    if evaluates and results.reward_model is None:
        with results.timed("eval"):
            results.reward_model = report_on_reward(parts, module.roles, start)
    if evaluates and trains and not results.before:
        console.print("[bold]eval[/] before training")
        with results.timed("eval"):
            results.before, results.rollout = evaluate_policy(parts, module.roles)
        results.save(run_dir)
    if trains:
        console.print(f"[bold]rl[/] {cfg.algorithm.n_iterations} iterations")
        with results.timed("rl"):
            callbacks = rl_callbacks(
                parts, run_dir, results, metrics, samples, logger, diagnostics, resume_from
            )
            train_policy(parts, module, callbacks, checkpoints, resume_from)
        results.save(run_dir)
    elif resume_from is not None:
        with as_config_errors(str(resume_from.path)):
            load_trainable(module, resume_from.weights())
    if evaluates:
        console.print("[bold]eval[/]" + (" after training" if trains else ""))
        with results.timed("eval"):
            results.after, results.rollout = evaluate_policy(parts, module.roles)
        budget = None if parts.cache.is_dense else parts.cache.budget
        results.final = final_metrics(results.before, results.after, budget)
        results.save(run_dir)
    report = make_report(parts, results, metrics, samples, run_dir)
    pictures = figures(report)
    write_report(run_dir / REPORT, report, pictures)
    log_outcome(
        logger,
        {"before": results.before, "after": results.after},
        results.final,
        pictures,
        place_of(metrics.history),
        run_dir / REPORT,
        checkpoints.latest(),
    )
    return results


def rl_callbacks(
    parts: Parts,
    run_dir: Path,
    results: Results,
    metrics: MetricsFile,
    samples: Samples,
    logger: GuardedLogger,
    diagnostics: Sequence[Diagnostic],
    resume_from: Checkpoint | None,
) -> list[RLCallback]:
    """In the order in which they are called: what adds to the metrics first, what shows them last."""
    cfg = parts.cfg
    resumed_at = 0 if resume_from is None else resume_from.iteration
    callbacks: list[RLCallback] = [
        RolloutStatistics(),
        RunAxes(metrics.history),
        *diagnostics,
        DiagnosticsFile(run_dir, diagnostics, resumed_at),
    ]
    if cfg.distillation is not None:
        callbacks.append(build(cfg.distillation))

    def draw(rollout: Rollout) -> list[Picture]:
        return figures(make_report(parts, replace(results, rollout=rollout), metrics, samples, run_dir))

    logging_callback = LoggingCallback(logger, samples, metrics.history, draw)
    return [*callbacks, metrics, logging_callback, samples, ProgressBar()]


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
    target = run_dir / BACKBONE
    if (start / WARM_DONE).is_file() and not target.exists():
        try:
            shutil.copytree(start, target, copy_function=os.link)
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(start, target)


def make_report(
    parts: Parts, results: Results, metrics: MetricsFile, samples: Samples, run_dir: Path
) -> RunReport:
    cfg, rollout = parts.cfg, results.rollout
    seen = [] if rollout is None else sorted(set(rollout.token_ids.flatten().tolist()))
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


def main() -> None:
    """The command line: errors of the config end in one line, before any work."""
    try:
        check_command_line("config", sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    run_command_line()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def run_command_line(cfg: DictConfig) -> None:
    """What a command line that composes asks for."""
    console = stderr_console()
    hydra_cfg = HydraConfig.get()
    run_dir = Path(hydra_cfg.runtime.output_dir)
    resumes = cfg.resume is not None
    try:
        if not resumes:
            check_keys(cfg, hydra_cfg.runtime.choices, hydra_cfg.overrides.task)
        else:
            discard_if_empty(run_dir)
            run_dir, cfg = resumed(cfg, hydra_cfg.overrides.task)
        check_config(cfg)
        logging.getLogger().addHandler(logging.FileHandler(run_dir / LOG, delay=True))
        results = fit(cfg, run_dir, console, resumes=resumes)
    except ConfigError as error:
        discard_if_empty(run_dir)
        sys.exit(f"error: {error}")
    console.print(summary_table(results.before, results.after, results.stage_seconds, results.reward_model))
    console.print(f"report: {run_dir / REPORT}")


def resumed(cfg: DictConfig, overrides: Sequence[str] = ()) -> tuple[Path, DictConfig]:
    """The folder and the config of the run to go on with.

    Raises:
        ConfigError: there is no run, or more is asked for than to go on with it.
    """
    run_dir = Path(cfg.resume)
    others = [override for override in overrides if not override.startswith("resume=")]
    if others:
        raise ConfigError(f"resume goes on with a run's own config; leave out {', '.join(others)}")
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(
            f"resume={cfg.resume} is not a run folder (no {CONFIG} there); give one under {cfg.runs_dir}/"
        )
    return run_dir, load_config(run_dir)


def discard_if_empty(folder: Path) -> None:
    """Hydra makes the folder of a run before anything is checked."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


if __name__ == "__main__":
    main()
