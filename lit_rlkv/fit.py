"""python -m lit_rlkv.fit: compose the config, build the run, go through its stages, write the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

from hydra.core.utils import configure_log
from omegaconf import DictConfig
from rich.console import Console

from lit_rlkv.cli import compose_arguments, run_command
from lit_rlkv.config import AUTO, Config, ConfigError, check_folders, check_keys, label_logger, parse_config
from lit_rlkv.config.keys import check_effects
from lit_rlkv.config.resumed import load_resumed_config
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.files import is_disk_full
from lit_rlkv.interrupts import InterruptedRunError, Interruption, ask_for_requeue, exit_soon

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lit_rlkv.evaluation.results import Results
    from lit_rlkv.runs.preflight import CheckedConfig


@dataclass(frozen=True)
class FitArguments:
    """A run to start or to resume."""

    config: Config
    hydra_cfg: DictConfig
    choices: Choices | None
    """With which the run was started; None if its folder does not tell."""
    old_dir: Path | None
    """Folder of the run to resume."""


def main() -> None:
    """Run the command line. A mistake of the user ends it in one line, before any work."""
    ask_for_requeue("asked to end before any work; nothing has changed")  # while torch loads
    stages = ("lit_rlkv.stages.evaluation", "lit_rlkv.stages.rl", "lit_rlkv.stages.sft")
    run_command(_parse, stages, _fit_and_show)


def _parse(arguments: Sequence[str]) -> FitArguments:
    cfg, hydra_cfg = compose_arguments("config", arguments)
    check_folders(cfg)
    overrides = list(hydra_cfg.overrides.task)
    given = Choices(dict(hydra_cfg.runtime.choices), tuple(overrides))
    choices: Choices | None = given
    old_dir: Path | None = None
    if cfg.resume in (None, AUTO):
        check_keys(cfg, given.options, overrides)
        check_effects(cfg, overrides)
    else:
        old_dir, cfg, choices = load_resumed_config(cfg, given)
    if choices is not None:
        label_logger(cfg, choices.options, choices.overrides)
    return FitArguments(
        parse_config(cfg), hydra_cfg, choices, None if old_dir is None else old_dir.absolute()
    )


def _fit_and_show(asked: FitArguments) -> None:
    # Imported here, so that mistakes on the command line are reported before torch is loaded.
    from lit_rlkv.out_of_memory import MemoryExhaustedError
    from lit_rlkv.reporting.progress import say, stderr_console
    from lit_rlkv.reporting.tables import summary_table
    from lit_rlkv.run_files import REPORT
    from lit_rlkv.runs.preflight import build_and_check
    from lit_rlkv.runs.resume import discard_if_empty, end_of_run, log_to_file, open_session

    configure_log(asked.hydra_cfg.job_logging, asked.hydra_cfg.verbose)
    console, interruption = stderr_console(), Interruption()
    overrides = list(asked.hydra_cfg.overrides.task)
    run_dir = asked.old_dir or Path(asked.hydra_cfg.run.dir).absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be made: {error}; give another runs_dir") from error
    try:
        with interruption.handle_signals():
            cfg = build_and_check(asked.config)
            with open_session(cfg, run_dir, asked.old_dir, console, interruption) as session:
                run_dir = session.run_dir
                results = fit(
                    cfg,
                    run_dir,
                    console,
                    resumes=session.is_resumed,
                    fabric=session.fabric,
                    interruption=interruption,
                    choices=asked.choices,
                )
    except MemoryExhaustedError as error:
        log_to_file("the allocation that failed:", error)
        raise
    except OSError as error:
        if not is_disk_full(error):
            raise
        full = InterruptedRunError(f"the disk is full: {error}", SIGINT)
        raise ConfigError(end_of_run(full, run_dir, overrides)[0]) from error
    except InterruptedRunError as error:
        message, code = end_of_run(error, run_dir, overrides)
        console.print(message, markup=False, highlight=False, soft_wrap=True)
        # A launcher takes another exit code of any rank for a failure, and may kill rank 0.
        exit_soon(code if not console.quiet else 0)
    finally:
        discard_if_empty(run_dir)
    console.print(summary_table(results.before, results.after, results.stage_seconds, results.reward_model))
    say(console, f"report: {run_dir / REPORT}")


def fit(
    cfg: "CheckedConfig",
    run_dir: Path,
    console: Console,
    *,
    resumes: bool = False,
    fabric: "Fabric | None" = None,
    interruption: Interruption | None = None,
    choices: Choices | None = None,
) -> "Results":
    """Run the stages of a checked config; all files of the run are in `run_dir`.

    Args:
        resumes: True if the folder holds an earlier part of this run.
        fabric: launched Fabric; None runs in this process.
        choices: with which the run was started, for the header and for the command that resumes it; None if
            they are unknown.

    Raises:
        ConfigError: the folder holds a run, and `resumes` is False.
        InterruptedRunError: a signal asked the run to end; its state is saved.
    """
    from lit_rlkv.reporting.header import header, trained_parameters
    from lit_rlkv.reporting.progress import say
    from lit_rlkv.run_files import CONFIG
    from lit_rlkv.runs.checks import check_reward_functions, check_shares, try_diagnostics, try_optimizers
    from lit_rlkv.runs.launch import broadcast_from_rank_zero
    from lit_rlkv.runs.memory import check_memory
    from lit_rlkv.runs.outputs import RunOutputs
    from lit_rlkv.runs.policy import make_policy
    from lit_rlkv.runs.run import Run
    from lit_rlkv.runs.starting_model import backbone_id, check_backbone, check_sources, find_starting_model
    from lit_rlkv.runs.teacher import load_teacher
    from lit_rlkv.stages.evaluation import evaluate_after_training, evaluate_before_training
    from lit_rlkv.stages.rl import train_policy
    from lit_rlkv.stages.sft import make_starting_model

    # 1. build: tokenizer, task and rewards; what an earlier process has left
    if not resumes and (run_dir / CONFIG).exists():
        raise ConfigError(
            f"{run_dir} holds a run already; give resume={run_dir} to resume it, or another folder"
        )
    run = Run(cfg, fabric, run_dir, console, interruption)
    start = broadcast_from_rank_zero(run.fabric, lambda: find_starting_model(cfg, run_dir))
    check_shares(cfg, run.fabric.world_size)
    try_optimizers(cfg, run.fabric.device)
    check_reward_functions(run)
    load_teacher(run)
    options = {} if choices is None else choices.options
    for line in header(cfg, run_dir, run.fabric.world_size, run.fabric.device, options):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    check_memory(run, start)
    run.begin()
    outputs = RunOutputs(run)
    if choices is not None and run.is_rank_zero:
        choices.save(run_dir)
    check_sources(run.resume_from, cfg)
    with outputs.open():
        # 2. stages: sft, evaluation, rl, evaluation
        start = make_starting_model(run, start)
        module = make_policy(run, start)
        backbone = broadcast_from_rank_zero(run.fabric, lambda: backbone_id(start))
        check_backbone(run.resume_from, start, backbone)
        say(console, trained_parameters(module), stage="roles")
        try_diagnostics(run, module)
        run.interruption.raise_if_requested(run.fabric)
        if "eval" in cfg.stages:
            evaluate_before_training(run, module, start)
        if "rl" in cfg.stages:
            run.interruption.raise_if_requested(run.fabric)  # before the first rollout
            say(console, f"{cfg.algorithm.n_iterations} iterations", stage="rl")
            with run.timed("rl"):
                train_policy(run, module, outputs.callbacks(), backbone)
            outputs.keep_trained_seconds()
        else:
            say(console, "not in stages", stage="rl")
            if run.resume_from is not None:
                run.resume_from.load_into(module)
        if "eval" in cfg.stages:
            evaluate_after_training(run, module)
        else:
            say(console, "not in stages", stage="eval")
        # 3. report
        outputs.write_report()
    return run.results


if __name__ == "__main__":
    main()
