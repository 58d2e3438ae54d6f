"""Start the logger of a run, and send it the outcome at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lit_rlkv.config import as_config_errors, build
from lit_rlkv.reporting.loggers import Cell, GuardedLogger, RunLogger, RunStart
from lit_rlkv.reporting.loggers.lightning_loggers import as_run_logger
from lit_rlkv.reporting.report import Picture
from lit_rlkv.reporting.run_metrics import AxisValues
from lit_rlkv.runs import environment
from lit_rlkv.runs.checkpoint import Checkpoint
from lit_rlkv.runs.context import RunContext
from lit_rlkv.types import EvalRow

EVALUATION_HEADINGS = ("when", *(column.name for column in fields(EvalRow)))


def start_logger(context: RunContext, run_dir: Path, resumed_at: int, console: Console) -> GuardedLogger:
    """Write down what the run runs on, and make its logger, which a `with` block opens; the first rank does.

    Raises:
        ConfigError: the logger's settings cannot be meant.
    """
    cfg = context.cfg
    found = environment.describe(cfg, context.fabric.device)
    is_first = context.fabric.is_global_zero
    if is_first:
        environment.record(run_dir, found)
    with as_config_errors("logger"):
        logger = None if cfg.logger is None or not is_first else _make_logger(cfg.logger, run_dir)
    config = cast("dict[str, Any]", OmegaConf.to_container(cfg.source))
    return GuardedLogger(logger, RunStart(run_dir, config, found, resumed_at), console)


def _make_logger(node: DictConfig, run_dir: Path) -> RunLogger:
    """The config's logger; one of Lightning's, under `_partial_`, is told the folder of the run."""
    built = build(node)
    return as_run_logger(
        built(**{"save_dir": run_dir, **built.keywords}) if isinstance(built, partial) else built
    )


def log_outcome(
    logger: GuardedLogger,
    evaluations: Mapping[str, Sequence[EvalRow]],
    final: Mapping[str, float],
    pictures: Sequence[Picture],
    place: AxisValues,
    report: Path,
    checkpoint: Checkpoint | None,
) -> None:
    """Send the outcome of a run to its logger; missing parts are left out.

    Args:
        evaluations: by when they were made, before or after training.
        report: the page.
        checkpoint: the last one.
    """

    def send(to: RunLogger) -> None:
        rows = evaluation_rows(evaluations)
        if rows:
            to.table("evaluation", EVALUATION_HEADINGS, rows, place)
        if final:
            to.scalars(final, place)
        if pictures:
            to.figures(pictures, place)
        to.file(report, "report")
        if checkpoint is not None:
            to.file(checkpoint.path, "model")

    logger.send("the outcome", send)


def evaluation_rows(evaluations: Mapping[str, Sequence[EvalRow]]) -> list[list[Cell]]:
    """Cells under EVALUATION_HEADINGS."""
    return [[when, *astuple(row)] for when, rows in evaluations.items() for row in rows]
