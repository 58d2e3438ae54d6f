"""What stands beside every measured number: machine, commit, versions; one JSON line per run."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
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
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() + ("+changes" if is_dirty.stdout.strip() else ""),
        "device": f"{device}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft", "lightning")},
    }


def cpu_name() -> str:
    """Model of the processor and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def append(name: str, row: dict) -> None:
    """Add one measurement to benchmarks/results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(provenance() | row) + "\n")
