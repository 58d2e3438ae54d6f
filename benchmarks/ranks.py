"""What a second process brings: tokens per second, and a model of where the time goes.

    python benchmarks/ranks.py [--iterations 8]     on a machine that does nothing else, with 2 cores or more

One run pinned to one core with N prompts, and one of two processes on two cores with 2N, each of which has
the work of the first; in turns, each with one thread a process. Beside them the time that two processes take
to add up as many numbers as training has gradients. Rows go to benchmarks/results/ranks.jsonl.

The model: an iteration takes as long as one process needs for its own share of the prompts, plus for each
optimizer step the time of one sum over the gradients; so W processes make W times the tokens in
T + n_steps · t(gradients) seconds. What comes on top is waiting: for the longest responses of any rank, and
for the memory that the processes share.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
SETTINGS = (
    "model.preset.hidden_size=256",
    "model.preset.num_hidden_layers=4",
    "model.preset.head_dim=64",
    "model.preset.intermediate_size=768",
    "rollout.max_new_tokens=64",
    "sft.n_steps=10",
    "evaluation.n_prompts=64",
    "diagnostics=none",
    "+diagnostics.performance={_target_:lit_rlkv.callbacks.diagnostics.performance.Performance,every:1}",
    "fabric.accelerator=cpu",
    "fabric.n_threads=1",
)
N_PROMPTS, GROUP_SIZE = 16, 8
"""Of each process."""
N_RESPONSES = N_PROMPTS * GROUP_SIZE
PHASES = ("rollout", "score", "reward", "update")


def run(n_ranks: int, n_iterations: int, folder: Path, stage: str) -> Path:
    """One process of fit, or one for each core, pinned to as many cores."""
    run_dir = folder / f"{stage}-{n_ranks}"
    command = [
        *("taskset", "-c", ",".join(map(str, range(n_ranks)))),
        *(sys.executable, "-m", "lit_rlkv.fit", *SETTINGS),
        f"algorithm.group_size={GROUP_SIZE}",
        f"stages=[{stage}]",
        f"fabric.devices={n_ranks}",
        f"rollout.n_prompts={n_ranks * N_PROMPTS}",
        f"algorithm.n_iterations={n_iterations}",
        f"runs_dir={folder}",
        f"hydra.run.dir={run_dir}",
    ]
    subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True
    )
    return run_dir


def medians(run_dir: Path) -> dict[str, float]:
    """Seconds of each phase, and tokens per second of the rollout, over the iterations but the first."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    names = {f"{phase}_s": f"time/{phase}" for phase in PHASES} | {"n_tokens": "num_tokens"}
    found = {name: statistics.median(row[metric] for row in rows[1:]) for name, metric in names.items()}
    rates = [row["num_tokens"] / row["time/rollout"] for row in rows[1:]]
    return found | {"rollout_tokens_per_s": statistics.median(rates)}


def n_numbers(path: Path) -> int:
    """Of all tensors in a file."""
    return sum(value.numel() for value in load_file(path).values())


def sum_seconds(n_numbers: int) -> float:
    """Of a sum of that many numbers over two processes, the median of 20."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    found: float = fabric.launch(_time_sums, n_numbers)
    return found


def _time_sums(fabric: Fabric, n_numbers: int) -> float:
    torch.set_num_threads(1)
    numbers, seconds = torch.ones(n_numbers), []
    for _ in range(20):
        fabric.barrier()
        started_at = time.perf_counter()
        dist.all_reduce(numbers)
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(1, 1, folder, "sft")
        alone, both = (run(n_ranks, args.iterations, folder, "rl") for n_ranks in (1, 2))
        one, two = medians(alone), medians(both)
        n_parameters = n_numbers(alone / "backbone" / "model.safetensors")
        n_gradients = n_numbers(sorted(alone.glob("checkpoints/iteration-*/trainable.safetensors"))[-1])
    sum_s = sum_seconds(n_gradients)
    sizes = {"n_parameters": n_parameters, "n_gradients": n_gradients, "n_responses": N_RESPONSES}
    for n_ranks, found in ((1, one), (2, two)):
        record.append("ranks", {"n_ranks": n_ranks, **sizes, "sum_s": sum_s, **found})
    total = {n: sum(found[f"{phase}_s"] for phase in PHASES) for n, found in ((1, one), (2, two))}
    predicted = total[1] + sum_s
    gain = two["rollout_tokens_per_s"] / one["rollout_tokens_per_s"]
    whole = (two["n_tokens"] / total[2]) / (one["n_tokens"] / total[1])
    print("| processes | " + " | ".join(f"{phase}, s" for phase in PHASES) + " | tokens/s of rollout |")
    print("|---" * (len(PHASES) + 2) + "|")
    for n_ranks, found in ((1, one), (2, two)):
        cells = [f"{found[f'{phase}_s']:.2f}" for phase in PHASES]
        print(f"| {n_ranks} | " + " | ".join(cells) + f" | {found['rollout_tokens_per_s']:,.0f} |")
    print(f"rollout: {gain:.2f} times the tokens per second; whole iteration: {whole:.2f} times")
    print(
        f"an iteration of two: {total[2]:.2f} s, predicted {predicted:.2f} s, of which {1000 * sum_s:.1f} ms "
        f"for a sum over {n_gradients:,} gradients"
    )
    print(f"model of {n_parameters:,} parameters, {N_RESPONSES} responses a process")


if __name__ == "__main__":
    main()
