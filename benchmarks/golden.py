"""Check that two versions of the code train, evaluate and export bit for bit the same.

    python benchmarks/golden.py record FILE [--tree CHECKOUT]  run everything, write the results to FILE
    python benchmarks/golden.py check FILE [--tree CHECKOUT]   run again and compare; exit code 1 if different

Use it before and after a change that must not change any number (a move, a rename, a refactoring). It runs
`debug=fast` of one experiment per algorithm family, the default run with 20 iterations, and evaluate and
export of the latter: about 7 minutes on two cores. Records of different processors cannot be compared.
Columns of times, speeds and memory are left out; METRIC_NAMES maps columns that the change has renamed.
"""

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command_line

FAST = {
    "smd": [],
    "naive": [],
    "tis": [],
    "hydra_ppo": [],
    "online_dpo_smd": [],
    "rlhf": ["sft.on_policy_pairs.n_prompts=64"],
}
NOT_COMPARED = ("time/", "perf/", "memory/", "seconds", "tokens_per_second", "mib", "flops", "_s")
METRIC_NAMES: dict[str, str] = {}
"""Old to new names of metrics, for a change that renames some."""


def call(tree: Path, program: str, *arguments: str) -> None:
    """Run one of the package's programs with the code of `tree`, on one thread."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-m", f"lit_rlkv.{program}", *arguments],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{program} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def is_compared(name: str) -> bool:
    """True for columns that do not depend on the speed of the machine."""
    return not any(part in name for part in NOT_COMPARED)


def read_run(folder: Path) -> dict:
    """Return the files of a run, without times."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    evaluation = json.loads((folder / "evaluation.json").read_text())
    return {
        "metrics": [{key: value for key, value in row.items() if is_compared(key)} for row in rows],
        "evaluation": {name: evaluation[name] for name in ("before", "after", "reward_model")},
        "weights": digests(folder / "checkpoints"),
    }


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every weights file below a folder."""
    files = sorted(folder.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


SFT = ("sft.batch_size=128", "sft.n_pairs=32")
"""Settings of the first golden record; the defaults have changed since."""


def run_all(tree: Path, *, is_fast: bool) -> dict:
    """Run everything, two at a time; without the default run if `is_fast`."""
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        runs_dir = Path(work) / "runs"

        def fast(name: str) -> dict:
            folder = runs_dir / name
            call(
                tree,
                "fit",
                "debug=fast",
                f"experiment={name}",
                f"runs_dir={runs_dir / ('of_' + name)}",
                f"hydra.run.dir={folder}",
                *FAST[name],
            )
            return read_run(folder)

        def default() -> dict:
            folder = runs_dir / "default"
            call(
                tree,
                "fit",
                "algorithm.n_iterations=20",
                *SFT,
                f"runs_dir={runs_dir}",
                f"hydra.run.dir={folder}",
            )
            result = read_run(folder)
            call(
                tree, "evaluate", f"ckpt={folder}", "n_samples=2", "temperature=1", "policies=[random,snapkv]"
            )
            evaluation = json.loads((folder / "evaluate.json").read_text())
            del evaluation["environment"]
            result["evaluate"] = evaluation
            call(tree, "export", f"ckpt={folder}", f"to={Path(work) / 'export'}")
            result["export"] = digests(Path(work) / "export")
            return result

        jobs = {} if is_fast else {"default": pool.submit(default)}
        jobs |= {name: pool.submit(fast, name) for name in FAST}
        for name, job in jobs.items():
            found[name] = job.result()
            print(f"{name}: done", flush=True)
    return found


def differences(old: object, new: object, path: str = "") -> list[str]:
    """Every place where two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        old = {METRIC_NAMES.get(key, key): value for key, value in old.items()}
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line
            for key in keys
            for line in (
                differences(old[key], new[key], f"{path}/{key}")
                if key in old and key in new
                else [f"{path}/{key}: only in the {'old' if key in old else 'new'} record"]
            )
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return [line for i, (a, b) in enumerate(pairs) for line in differences(a, b, f"{path}/{i}")]
    return [] if old == new or (old != old and new != new) else [f"{path}: {old} -> {new}"]


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--fast", action="store_true", help="leave out the default run (2 minutes)")
    args = parser.parse_args()
    found = run_all(args.tree.resolve(), is_fast=args.fast)
    if args.action == "record":
        args.file.write_text(json.dumps(found, indent=1))
        return
    known = json.loads(args.file.read_text())
    compared = {name: known[name] for name in known if name in found}
    changed = differences(compared, json.loads(json.dumps(found)))
    print("\n".join(changed[:60]) or "equal")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
