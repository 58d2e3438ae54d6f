"""Speed-up by a second process: tokens per second of the rollout and of whole iterations.

    python benchmarks/ranks.py [--rounds 3] [--iterations 8] [--record]   on a machine with 2 idle cores

One run pinned to one core with N prompts, and one of two processes on two cores with 2N, each of which has
the work of the first; in turns, round after round, each with one thread a process and one policy throughout
(a learning rate of 1e-9), whose responses are as long in all of them. Medians over the iterations of all
rounds.
"""

import statistics
import tempfile
from pathlib import Path

import command_line
import record
from fit_process import fit
from study_parts.runs import read_metrics
from text_table import text_table

NAME = "ranks"
SETTINGS = (
    "model.preset.hidden_size=256",
    "model.preset.num_hidden_layers=4",
    "model.preset.head_dim=64",
    "model.preset.intermediate_size=768",
    "rollout.max_new_tokens=64",
    "optimizer.lr=1e-9",
    "sft.n_steps=10",
    "evaluation.n_prompts=64",
    "diagnostics=none",
    "+diagnostics.performance={_target_:lit_rlkv.callbacks.performance.Performance,every:1}",
    "fabric.accelerator=cpu",
)
N_PROMPTS, GROUP_SIZE = 16, 8
N_RESPONSES = N_PROMPTS * GROUP_SIZE
PHASES = ("rollout", "score", "reward", "update")


def run(n_ranks: int, n_iterations: int, folder: Path, stage: str, number: int = 0) -> Path:
    """One process of fit, or one for each core, pinned to as many cores."""
    overrides = [
        *SETTINGS,
        f"algorithm.group_size={GROUP_SIZE}",
        f"stages=[{stage}]",
        f"fabric.devices={n_ranks}",
        f"rollout.n_prompts={n_ranks * N_PROMPTS}",
        f"algorithm.n_iterations={n_iterations}",
    ]
    pinned = ("taskset", "-c", ",".join(map(str, range(n_ranks))))
    return fit(folder / f"{stage}-{n_ranks}-{number}", folder, overrides, before=pinned)


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the seconds of each iteration but the first."""
    rows = read_metrics(run_dir)[1:]
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each phase, tokens of an iteration, tokens per second of its rollout and of all of it."""
    names = {f"{phase}_s": f"time/{phase}" for phase in PHASES} | {"n_tokens": "num_tokens"}
    found = {name: statistics.median(row[metric] for row in rows) for name, metric in names.items()}
    rates = {
        "rollout_tokens_per_s": [row["num_tokens"] / row["time/rollout"] for row in rows],
        "tokens_per_s": [row["num_tokens"] / sum(row[f"time/{phase}"] for phase in PHASES) for row in rows],
    }
    return found | {name: statistics.median(values) for name, values in rates.items()}


def gains(one: dict[str, float], two: dict[str, float]) -> list[float]:
    """Return the speed-up of the rollout and of the whole iteration."""
    return [two[name] / one[name] for name in ("rollout_tokens_per_s", "tokens_per_s")]


def measure(n_rounds: int, n_iterations: int) -> dict[int, dict[str, float]]:
    """Medians of one process and of two."""
    rows: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(1, 1, folder, "sft")
        for number in range(n_rounds):
            new = {n: rows_of(run(n, n_iterations, folder, "rl", number)) for n in rows}
            rollout, whole = gains(medians(new[1]), medians(new[2]))
            said = f"round {number + 1}: rollout {rollout:.2f} times, whole iteration {whole:.2f} times"
            print(said, flush=True)
            rows = {n: rows[n] + new[n] for n in rows}
    return {n: medians(found) for n, found in rows.items()}


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = measure(args.rounds, args.iterations)
    for n_ranks, values in found.items():
        record.append(
            NAME, {"n_ranks": n_ranks, "n_rounds": args.rounds, "n_responses": N_RESPONSES, **values}
        )
    headings = ["processes", *(f"{phase}, s" for phase in PHASES), "tokens/s of rollout"]
    rows = [
        [
            str(n),
            *(f"{values[f'{phase}_s']:.2f}" for phase in PHASES),
            f"{values['rollout_tokens_per_s']:,.0f}",
        ]
        for n, values in found.items()
    ]
    rollout, whole = gains(found[1], found[2])
    print(text_table(headings, rows))
    print(f"rollout: {rollout:.2f} times the tokens per second; whole iteration: {whole:.2f} times")


if __name__ == "__main__":
    main()
