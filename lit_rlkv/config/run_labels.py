"""Choices with which a run is started, and its labels in loggers: its experiment, task, model and seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePath

from omegaconf import DictConfig

from lit_rlkv.files import read_if_there, read_json, write_atomically
from lit_rlkv.run_files import CHOICES
from lit_rlkv.settings import dataclass
from lit_rlkv.trust import KEY

OURS = "lit_rlkv.reporting.loggers."
"""Loggers whose null labels are filled in; those of others keep what null means to them."""
ARM_GROUPS = ("algorithm", "correction", "distillation", "reward", "roles")
"""Groups that a preset of `experiment` chooses; one given on the command line changes what is trained."""
MAX_TAG = 64
"""Longest tag that W&B takes, in characters."""


@dataclass(frozen=True)
class Choices:
    """Options of the config groups and overrides of the command line that starts or resumes a run."""

    options: dict[str, str | None]
    """the option chosen in each group"""
    overrides: tuple[str, ...]
    """of the command line"""

    def with_more(self, later: "Choices") -> "Choices":
        """Return these choices, changed by those that a later command line gives itself.

        A key below a group that was left out, such as `diagnostics.gradient.every`, brings the later option.
        """
        given = {override.lstrip("+~").partition("=")[0] for override in later.overrides}
        off = {group for group, option in self.options.items() if option == "none"}
        given |= {key.partition(".")[0] for key in given} & off
        changed = {group: option for group, option in later.options.items() if group in given}
        return Choices({**self.options, **changed}, (*self.overrides, *later.overrides))

    def save(self, run_dir: Path) -> None:
        """Write the choices into a run folder, without the trust in modules, which no folder grants."""
        kept = tuple(each for each in self.overrides if not each.lstrip("+").startswith(KEY))
        write_atomically(run_dir / CHOICES, json.dumps(asdict(replace(self, overrides=kept)), indent=1))

    @classmethod
    def load(cls, run_dir: Path) -> "Choices | None":
        """Return the choices with which a run was started; None if its folder does not tell.

        Raises:
            DamagedFileError: the file cannot be read.
        """
        return read_if_there(run_dir / CHOICES, cls._read, None)

    @classmethod
    def _read(cls, path: Path) -> "Choices | None":
        return cls(**read_json(path))


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
