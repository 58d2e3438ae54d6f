"""The record of every measurement: machine, commit, versions; one JSON line per run.

Rows go to benchmarks/results, a file for each name, if the command line says `--record`; without it they are
those of the process alone, and no file changes. Where BENCHMARK_RESULTS names a file, all rows go there.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
is_on = False
"""True if rows go to benchmarks/results; command_line.py sets it."""
unrecorded: list[tuple[str, dict]] = []
"""Name and row of what this process measured without a file for it."""
PACKAGES = ("torch", "triton", "transformers", "peft", "lightning")


def provenance() -> dict[str, str]:
    """Return machine, commit and versions of a measurement, without packages that are not installed."""
    import torch  # not at the top: Triton reads its environment when it is imported

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "source": _source(ROOT),
        "device": f"{device}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        **{name: found for name, found in versions.items() if found is not None},
    }


def _commit() -> str:
    """The clone's commit, and whether what it measures was changed since; "unknown" where there is no git."""
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    is_dirty = subprocess.run(
        [*git, "status", "--porcelain", "lit_rlkv", "conf"], capture_output=True, text=True, check=False
    )
    return (commit.stdout.strip() or "unknown") + ("+changes" if is_dirty.stdout.strip() else "")


@cache
def _source(root: Path) -> str:
    """Return a digest of the package's modules, which also tells uncommitted versions apart."""
    digest = hashlib.sha256()
    for file in sorted((root / "lit_rlkv").rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Model of the processor and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def append(name: str, row: dict) -> None:
    """Add one measurement of this name."""
    entry = ({} if one_file() is None else {"record": name}) | provenance() | row
    if not is_on and one_file() is None:
        if not unrecorded:
            print(f"not recorded; --record adds rows to benchmarks/results/{name}.jsonl", file=sys.stderr)
        unrecorded.append((name, entry))
        return
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def rows(name: str) -> list[dict]:
    """All measurements of this name, in the order of their time."""
    path = _path(name)
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found += [row for of, row in unrecorded if of == name]
    return found if one_file() is None else [row for row in found if row["record"] == name]


def one_file() -> str | None:
    """Return the file for the rows of all names, each with its name as `record`, if there is one."""
    return os.environ.get("BENCHMARK_RESULTS")


def _path(name: str) -> Path:
    file = one_file()
    return RESULTS / f"{name}.jsonl" if file is None else Path(file)


def find(name: str, **wanted: object) -> dict | None:
    """Return the latest measurement with these entries of this device and this version of the package."""
    here = provenance()
    wanted = {"source": here["source"], "device": here["device"], **json.loads(json.dumps(wanted))}
    found = (
        row for row in reversed(rows(name)) if all(row.get(key) == value for key, value in wanted.items())
    )
    return next(found, None)
