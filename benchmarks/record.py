"""What stands beside every measured number: machine, commit, versions; one JSON line per run."""

import json
import platform
import subprocess
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, str]:
    """Where and with what a number was measured."""
    git = ["git", "-C", str(RESULTS.parent)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    is_dirty = subprocess.run(
        [*git, "status", "--porcelain", "lit_rlkv"], capture_output=True, text=True, check=False
    )
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() + ("+changes" if is_dirty.stdout.strip() else ""),
        "device": f"{device}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def append(name: str, row: dict) -> None:
    """Add one measurement to benchmarks/results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(provenance() | row) + "\n")
