"""The gradient diagnostic: cost, agreement with brute force, and error of sketches.

    python benchmarks/gradient_variance.py [--arms shadow smd tis] [--rollouts 200] [--record] [override ...]
    python benchmarks/gradient_variance.py --trained runs/... --arms shadow

For each arm (an experiment preset), on the default testbed:
- cost: seconds of `diagnostics.gradient` and `diagnostics.gradient_sources` at their default intervals, as a
  share of what iterations take without them. The policy trains meanwhile, as in a run.
- sketch: the variance of one rollout from sketches of several sizes, as a share of the whole gradient's; and
  of the parameters of each layer alone, their share of the variance and their signal-to-noise ratio.
- brute_force: the policy stands still (learning rate 0) while it writes fresh rollouts of fresh prompts. The
  variance of the gradients that training takes of them is compared with the mean of what the diagnostic
  estimates from each rollout alone, in standard errors of the difference; and the scatter of the estimates
  with the error that they state.
"""

import statistics
from pathlib import Path

import command_line
import record
import torch
from gradient_parts.runs import STANDS_STILL, FreshGradients, Log, config, run
from gradient_parts.sketches import Sketches

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.callbacks.gradient_variance import GradientVariance
from lit_rlkv.config import build

NAME = "gradient_variance"
DIAGNOSTICS = ("gradient", "gradient_sources")
SEEDS = 20
"""Sketches of each size."""


def cost(arm: str, n_iterations: int, overrides: list[str]) -> dict:
    """Seconds of the diagnostics, and of the iterations without them."""
    n = f"algorithm.n_iterations={n_iterations}"
    cfg = config(f"experiment={arm}", n, "callbacks.checkpoint_every=1000000", *overrides)
    diagnostics: list[Diagnostic] = [build(cfg.diagnostics[name]) for name in DIAGNOSTICS]
    log = Log()
    run(cfg, [*diagnostics, log])
    names = [f"time/diagnostics/{name}" for name in DIAGNOSTICS]
    plain = [
        row["time/data"] + row["time/update"] - sum(row.get(name, 0.0) for name in names) for row in log.rows
    ]
    # The first iteration waits for what every process waits for once.
    step_s = statistics.mean(plain[1:])
    row = {"kind": "cost", "arm": arm, "overrides": overrides, "step_s": step_s}
    for diagnostic, name in zip(diagnostics, names, strict=True):
        seconds = [found[name] for found in log.rows if name in found]
        measured_s = statistics.mean(seconds[1:] or seconds)
        row[diagnostic.name] = {"seconds": measured_s, "every": diagnostic.every}
        row[diagnostic.name]["share"] = measured_s / diagnostic.every / step_s
    return row


def brute_force(arm: str, n_rollouts: int, trained: Path | None, overrides: list[str]) -> dict:
    """Variance over fresh rollouts, and what was estimated from each of them."""
    n = f"algorithm.n_iterations={n_rollouts}"
    cfg = config(f"experiment={arm}", n, "diagnostics.gradient.every=1", *STANDS_STILL, *overrides)
    diagnostic = build(cfg.diagnostics.gradient)
    fresh, log = FreshGradients(), Log()
    run(cfg, [diagnostic, fresh, log], trained)
    spread = fresh.found.spread()
    assert spread is not None, "a single rollout has no variance"
    return {
        "kind": "brute_force",
        "arm": arm,
        "overrides": overrides,
        "trained": None if trained is None else trained.name,
        "n_rollouts": n_rollouts,
        "n_parts": diagnostic.n_parts,
        **compared(
            log, "variance", float(spread.per_prompt.sum()), spread.contrast_std / (n_rollouts - 1) ** 0.5
        ),
    }


def compared(log: Log, name: str, expected: float, error: float) -> dict[str, float]:
    """The mean of the estimates against a number known with this standard error."""
    found = torch.tensor([row[f"gradient/loss/{name}"] for row in log.rows], dtype=torch.float64)
    stated = torch.tensor([row[f"gradient/loss/{name}_se"] for row in log.rows], dtype=torch.float64)
    mean, its_error = float(found.mean()), float(found.std()) / len(found) ** 0.5
    return {
        "brute_force": expected,
        "brute_force_se": error,
        "estimate": mean,
        "estimate_se": its_error,
        "errors_off": (mean - expected) / (error**2 + its_error**2) ** 0.5,
        "scatter": float(found.std()),
        "stated_error": float(stated.square().mean().sqrt()),
    }


def sketched(arm: str, trained: Path | None, overrides: list[str]) -> dict:
    """Errors of sketches, and of layers alone, on one rollout."""
    cfg = config(f"experiment={arm}", "algorithm.n_iterations=1", *STANDS_STILL, *overrides)
    exact = GradientVariance(every=1, n_parts=cfg.diagnostics.gradient.n_parts, terms=["loss"], blocks="all")
    sketches = Sketches(exact, SEEDS)
    run(cfg, [exact, sketches], trained)
    return {"kind": "sketch", "arm": arm, "overrides": overrides, **sketches.found}


def report(row: dict) -> None:
    if row["kind"] == "cost":
        for name in DIAGNOSTICS:
            found = row[name]
            print(
                f"{row['arm']:8} {name:17} {found['seconds']:.2f} s every {found['every']} iterations of "
                f"{row['step_s']:.2f} s: {100 * found['share']:.1f} % of their time"
            )
    if row["kind"] == "brute_force":
        print(
            f"{row['arm']:8} variance over {row['n_rollouts']} rollouts {row['brute_force']:.5f} ± "
            f"{row['brute_force_se']:.5f}, mean estimate {row['estimate']:.5f} ± {row['estimate_se']:.5f}: "
            f"{row['errors_off']:+.1f} standard errors apart; an estimate scatters by {row['scatter']:.5f} "
            f"and says {row['stated_error']:.5f}"
        )
    if row["kind"] == "sketch":
        for size, found in row["sketches"].items():
            print(
                f"{row['arm']:8} sketch of {size:>6} of {row['n_parameters']}: variance off by "
                f"{100 * found['rms_error']:.1f} % (bound {100 * found['bound']:.1f} %)"
            )
        for block, found in row["blocks"].items():
            print(
                f"{row['arm']:8} {block} alone: {100 * found['variance_share']:.0f} % of the variance, "
                f"signal-to-noise ratio {found['snr']:.3f}, of the whole {row['snr']:.3f}"
            )


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--arms", nargs="+", default=["shadow", "smd", "tis"])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--cost-iterations", type=int, default=41)
    parser.add_argument(
        "--trained", type=Path, help="a run whose adapters are measured, not those of the start"
    )
    parser.add_argument("--kinds", nargs="+", default=["cost", "sketch", "brute_force"])
    args, overrides = parser.parse_known_args()
    for arm in args.arms:
        measures = {
            "cost": lambda arm=arm: cost(arm, args.cost_iterations, overrides),
            "sketch": lambda arm=arm: sketched(arm, args.trained, overrides),
            "brute_force": lambda arm=arm: brute_force(arm, args.rollouts, args.trained, overrides),
        }
        for kind in args.kinds:
            row = measures[kind]()
            record.append(NAME, row)
            report(row)


if __name__ == "__main__":
    main()
