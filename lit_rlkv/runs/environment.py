"""The environment of a run (code, packages, machine, command, seeds), recorded at each start."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lit_rlkv.config import Config
from lit_rlkv.files import read_if_there, write_atomically
from lit_rlkv.reporting.run_folder import read_environments
from lit_rlkv.run_files import ENVIRONMENT

PACKAGES = (
    "lit_rlkv",
    "torch",
    "triton",
    "transformers",
    "peft",
    "lightning",
    "numpy",
    "hydra-core",
    "wandb",
)
PACKAGE_DIR = Path(__file__).parent.parent
GIT_TIMEOUT_S = 10.0


def describe(cfg: Config, device: torch.device) -> dict[str, Any]:
    """Return the environment of this process, in plain types."""
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "git": git_state(PACKAGE_DIR),
        "seeds": {"seed": cfg.seed, "sft.seed": cfg.sft.seed},
        "device": describe_device(device),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": installed(PACKAGES),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the type, name and memory of the device, and the CPU threads."""
    found: dict[str, Any] = {
        "type": device.type,
        "n_cpus": os.cpu_count(),
        "n_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["name"] = torch.cuda.get_device_name(device)
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the code and if tracked files differ from it; None outside a clone."""
    # The package may be installed inside a clone of another project.
    if _git(folder, "ls-files", "--error-unmatch", "fit.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "is_dirty": changes != ""}


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def record(run_dir: Path, environment: dict[str, Any]) -> None:
    """Append a start of the run to its list."""
    path = run_dir / ENVIRONMENT
    starts = read_if_there(path, read_environments, [])
    write_atomically(path, json.dumps([*starts, environment], indent=1))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None without git or if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
