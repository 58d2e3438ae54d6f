"""Labels of a run in loggers that show many: its experiment, task, model and seed."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from omegaconf import DictConfig

OURS = "lit_rlkv.reporting.loggers."
"""Loggers whose null labels are filled in; those of others keep what null means to them."""
ARM_GROUPS = ("algorithm", "correction", "distillation", "reward", "roles")
"""Groups that a preset of `experiment` chooses; one given on the command line changes what is trained."""
MAX_TAG = 64
"""Longest tag that W&B takes, in characters."""


def label_logger(cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str]) -> None:
    """Fill in `name`, `group` and `tags` of the logger where they are null.

    Args:
        choices: the option chosen in each group.
        overrides: of the command line.
    """
    if cfg.logger is None or not str(cfg.logger.get("_target_")).startswith(OURS):
        return
    what = run_labels(cfg, choices, overrides)
    seed = f"seed{cfg.seed}"
    labels = {
        "name": "-".join([*what, seed]),
        "group": "-".join(what),
        "tags": [label[:MAX_TAG] for label in (*what, seed)],
    }
    for key, label in labels.items():
        if key in cfg.logger and cfg.logger[key] is None:
            cfg.logger[key] = label


def run_labels(
    cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str]
) -> tuple[str, ...]:
    """Return experiment, task and model of a run, which its seeds share.

    Groups that the command line gives beside the experiment follow it, as in `smd, correction=tis`.
    """
    given = {override.partition("=")[0] for override in overrides}
    arm = [f"{group}={choices[group]}" for group in ARM_GROUPS if group in given]
    preset = str(choices["experiment"])
    model = str(choices["model"]) if cfg.model.path is None else PurePath(cfg.model.path).name
    is_named = preset != "none" or not arm
    return (*([preset] if is_named else []), *arm, str(choices["task"]), model)
