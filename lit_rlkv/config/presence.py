"""Rules on what must be there before anything else can be looked at."""

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.config.building import require


def check_folders(cfg: DictConfig) -> None:
    """Where a run lies, and which one it goes on with.

    Raises:
        ConfigError: what is given is no folder, or none that can be made.
    """
    runs_dir, resume = cfg.get("runs_dir"), cfg.get("resume")
    require(
        isinstance(runs_dir, str) and runs_dir != "",
        f"runs_dir={runs_dir} is no folder; give one, such as runs_dir=runs",
    )
    require(
        resume is None or (isinstance(resume, str) and resume != ""),
        f"resume={resume} is no folder of a run; give resume=runs/NAME, or resume=auto",
    )
    asked = {"runs_dir": runs_dir, "resume": resume, "hydra.run.dir": OmegaConf.select(cfg, "hydra.run.dir")}
    for name, folder in asked.items():
        home = os.path.expanduser(str(folder))
        require(not str(folder).startswith("~"), f"{name}={folder}: ~ is not expanded here; give {home}")
        if folder is not None and name != "resume":
            _check_can_be_made(name, Path(folder))


def _check_can_be_made(name: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    reason = "" if there.is_dir() else f"{there} is a file"
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        reason = f"nothing can be written in {there}"
    require(not reason, f"{name}={folder} cannot be made, since {reason}; give another folder")


def check_given(cfg: DictConfig) -> None:
    """Check that every key without a default is given.

    Raises:
        ConfigError: naming what is not.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    is_or_are = "is" if len(missing) == 1 else "are"
    require(
        not missing,
        f"{', '.join(missing)} {is_or_are} not given; add {' '.join(f'{name}=...' for name in missing)}",
    )
