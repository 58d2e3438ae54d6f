"""python -m lit_rlkv.evaluate ckpt=...: score a saved run dense and at each budget."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from lit_rlkv.callbacks.summary import summary_table
from lit_rlkv.checkpoint import Checkpoint, CheckpointDir, load_checkpoint, load_trainable
from lit_rlkv.config import CONF_DIR, ConfigError, as_config_errors, check_config, expanded
from lit_rlkv.stages.evaluation import evaluate_policy
from lit_rlkv.stages.parts import BACKBONE, CHECKPOINTS, CONFIG, build_parts, load_config
from lit_rlkv.stages.training import make_policy
from lit_rlkv.types import EvalRow

RESULT = "evaluate.json"


def find_run(ckpt: Path) -> tuple[Path, Checkpoint | None]:
    """The run folder and checkpoint that a path means: a run (its newest checkpoint) or one checkpoint of it.

    Raises:
        ConfigError: the path is neither.
    """
    if (ckpt / CONFIG).is_file():
        return ckpt, CheckpointDir(ckpt / CHECKPOINTS).latest()
    run_dir = ckpt.parent.parent
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(
            f"ckpt={ckpt} is neither a run folder (with {CONFIG}) nor a checkpoint in one; "
            "give runs/NAME or runs/NAME/checkpoints/iteration-N"
        )
    try:
        return run_dir, load_checkpoint(ckpt)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def evaluate(overrides: DictConfig) -> tuple[Path, dict[str, object], list[EvalRow]]:
    """The run's folder, what was scored and how, and the accuracy table.

    What `overrides` leaves null is as the run had it. A run without a checkpoint is scored as it started.
    """
    run_dir, checkpoint = find_run(Path(overrides.ckpt))
    cfg = load_config(run_dir)
    for key in ("budgets", "n_prompts", "temperature"):
        if overrides[key] is not None:
            cfg.evaluation[key] = overrides[key]
    if overrides.kernels is not None:
        cfg.kernels = overrides.kernels
    if overrides.policy is not None:
        cfg.cache.policy = overrides.policy
    cfg.distillation = None  # of no meaning here, and not to be checked against another cache
    cfg.logger = None
    check_config(cfg)
    parts = build_parts(cfg)
    own = run_dir / BACKBONE
    start = own if own.is_dir() else expanded(cfg.model.path)
    assert start is not None  # a run without a warm model has a model.path
    module = make_policy(parts, start)
    if checkpoint is not None:
        with as_config_errors(f"ckpt={overrides.ckpt}"):
            load_trainable(module, checkpoint.weights())
    rows, _ = evaluate_policy(parts, module.roles)
    scored = {
        "iteration": 0 if checkpoint is None else checkpoint.iteration,
        "temperature": cfg.evaluation.temperature,
        "seed": cfg.seed,
    }
    return run_dir, scored, rows


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="evaluate")
def main(overrides: DictConfig) -> None:
    """The command line."""
    try:
        run_dir, scored, rows = evaluate(overrides)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    result = run_dir / RESULT
    result.write_text(json.dumps(scored | {"rows": [asdict(row) for row in rows]}, indent=1))
    console = Console()
    console.print(f"after {scored['iteration']} iterations of RL, temperature {scored['temperature']}")
    console.print(summary_table([], rows, {}))
    console.print(f"written to {result}")


if __name__ == "__main__":
    main()
