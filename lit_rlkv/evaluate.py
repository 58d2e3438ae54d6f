"""python -m lit_rlkv.evaluate ckpt=...: score a saved run dense and at each budget of each policy."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lit_rlkv.cli import compose_arguments, run_command
from lit_rlkv.config import (
    ConfigError,
    as_config_errors,
    check_saved_code,
    check_targets,
    parse,
    parse_config,
    require,
)
from lit_rlkv.config.commands import EvaluateConfig
from lit_rlkv.files import write_atomically
from lit_rlkv.settings import SAMPLING, show

if TYPE_CHECKING:
    from lit_rlkv.evaluation.evaluator import ScoredResponse
    from lit_rlkv.evaluation.results import CacheEstimates, EvalRow

OF_EVALUATION = ("budgets", "n_prompts", "n_mismatch", "batch_size", "perplexity", *SAMPLING)
"""Settings that have the same name in the group `evaluation` of fit."""
PLAIN_WIDTH = 160
"""Width without a terminal, so that a wide table is not cut."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of a saved policy and the settings of the evaluation."""

    run_dir: Path
    settings: dict[str, Any]
    """Checkpoint, problems, sampling and environment, in plain types."""
    scored: "list[tuple[EvalRow, CacheEstimates]]"
    """Scores of each cache."""
    samples: "list[ScoredResponse]"

    @property
    def rows(self) -> "list[EvalRow]":
        return [row for row, _ in self.scored]

    def save(self, name: str) -> Path:
        """Write `NAME.json` and, with a line for each sample, `NAME_samples.jsonl` into the run's folder.

        Raises:
            OSError: they cannot be written.
        """
        lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in self.samples]
        rows = [asdict(row) | {"estimates": asdict(found)} for row, found in self.scored]
        result, samples = self.run_dir / f"{name}.json", self.run_dir / f"{name}_samples.jsonl"
        write_atomically(samples, "".join(lines))
        write_atomically(result, json.dumps(self.settings | {"rows": rows}, indent=1))
        return result


def evaluate(asked: EvaluateConfig) -> Evaluation:
    """Score a saved run.

    Settings that are None come from the run. A run without a checkpoint is scored as it started.

    Raises:
        ConfigError: a setting is wrong, there is no such run, or its folder cannot be written; raised before
            any model is loaded.
    """
    from lit_rlkv.evaluation.estimates import estimate
    from lit_rlkv.evaluation.evaluator import caches_to_evaluate
    from lit_rlkv.runs import environment
    from lit_rlkv.runs.open_run import check_run, find_run, open_run
    from lit_rlkv.runs.preflight import check_accuracy
    from lit_rlkv.settings import DENSE
    from lit_rlkv.stages.evaluation import score_caches

    saved = find_run(Path(asked.ckpt).expanduser())
    check_targets(saved.cfg)
    for key in OF_EVALUATION:
        if (value := getattr(asked, key)) is not None:
            saved.cfg.evaluation[key] = value
    saved.cfg.kernels = asked.kernels or saved.cfg.kernels
    saved.cfg.reward.accuracy = asked.reward.accuracy or saved.cfg.reward.accuracy
    check_saved_code(parse_config(saved.cfg).reward.functions)
    cfg = check_run(saved)
    check_accuracy(cfg)
    require(
        not asked.pass_at_k or cfg.accuracy is not None,
        f"pass_at_k={show(asked.pass_at_k)} needs to know which responses are correct, and neither the task "
        "nor a function says so; leave it out",
    )
    n_samples, temperature = asked.n_samples, cfg.evaluation.temperature
    require(
        n_samples == 1 or temperature > 0,
        f"n_samples={n_samples} responses at temperature={temperature} are {n_samples} times the same one; "
        "give temperature=1 or so, or n_samples=1",
    )
    with as_config_errors("policies"):
        caches = caches_to_evaluate(cfg.parts.cache, cfg.evaluation.budgets, asked.policies)
    untrained = [one.policy_name for one in caches if one.is_trained and not cfg.parts.cache.is_trained]
    if untrained:
        raise ConfigError(
            f"policies={show(asked.policies)}: this run has trained no scorer for {untrained[0]}; leave it "
            "out"
        )
    if asked.budgets and {*(asked.policies or [cfg.cache.policy])} == {DENSE}:
        raise ConfigError(
            f"budgets={show(asked.budgets)} need an evicting policy, and there is only dense; add "
            "policies=[snapkv]"
        )
    _check_writable(saved.run_dir)
    run, module = open_run(saved, cfg)
    scored, samples = [], []
    for found in score_caches(run, module.roles, caches, asked.n_samples):
        scored.append((found.row, estimate(found.samples, asked.pass_at_k, level=asked.level)))
        samples += found.samples
    settings = {
        "checkpoint": None if saved.checkpoint is None else saved.checkpoint.path.name,
        "iteration": saved.iteration,
        "seed": cfg.seed,
        "n_prompts": scored[0][0].n_problems,
        "n_samples": asked.n_samples,
        "accuracy": cfg.accuracy,
        **{key: getattr(cfg.evaluation, key) for key in SAMPLING},
        "batch_size": cfg.evaluation.batch_size,
        "n_mismatch": cfg.evaluation.n_mismatch,
        "perplexity": cfg.evaluation.perplexity,
        "level": asked.level,
        "environment": environment.describe(cfg, run.fabric.device),
    }
    return Evaluation(saved.run_dir, settings, scored, samples)


def _check_writable(run_dir: Path) -> None:
    """Check by writing a file that the results can be saved; permissions alone do not show it."""
    try:
        with TemporaryFile(dir=run_dir, buffering=0) as file:
            file.write(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{run_dir} must be writable for the results, got {error.strerror}; copy the run elsewhere, and "
            "give ckpt=COPY"
        ) from error


def main() -> None:
    """Run the command line. A mistake of the user ends it in one line, before any work."""
    run_command(_parse, ("lit_rlkv.stages.evaluation", "lit_rlkv.runs.open_run"), _evaluate_and_show)


def _parse(arguments: Sequence[str]) -> EvaluateConfig:
    return parse(EvaluateConfig, compose_arguments("evaluate", arguments)[0])


def _evaluate_and_show(asked: EvaluateConfig) -> None:
    from lit_rlkv.reporting.tables import score_table

    try:
        found = evaluate(asked)
    except ConfigError as error:  # with the names of this program, not of fit
        names = "|".join(OF_EVALUATION)
        raise ConfigError(re.sub(rf"\bevaluation\.({names})\b", r"\1", str(error))) from error
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        result = found.save(asked.name)
    except OSError as error:
        sys.exit(f"error: the results cannot be written: {error}")
    finally:
        settings = found.settings
        console.print(
            f"after {settings['iteration']} iterations of RL, {settings['n_prompts']} prompts × "
            f"{settings['n_samples']} samples, temperature {settings['temperature']}"
        )
        console.print(score_table(found.scored, asked.level))
    console.print(f"written to {result} and {result.stem}_samples.jsonl", soft_wrap=True)


if __name__ == "__main__":
    main()
