"""The tables of the study, as Markdown."""

from collections.abc import Mapping, Sequence

from study_parts import variance
from study_parts.analysis import Row, contrast, gained, holm, mean_sd, rollouts_to
from study_parts.plan import (
    ARMS,
    BUDGETS,
    MAIN_POLICY,
    MAIN_TASK,
    N_ITERATIONS,
    TIMED_ITERATIONS,
    TUNING_SEED,
)

ABSENT = "–"
GOAL = 0.75
"""Mean reward of the rollouts whose first reaching is counted."""

CONTRASTS = (
    ("naive", "dense"),
    ("tis", "naive"),
    ("mis", "naive"),
    ("sparse_rl", "naive"),
    ("shadow", "naive"),
    ("shadow", "dense"),
    ("smd", "shadow"),
    ("smd_dense", "shadow"),
    ("smd", "distill"),
    ("smd", "smd_current"),
)
"""Questions put to the main comparison: each with the anchor and without it, under the budget and dense."""

MAIN_SETTING = (MAIN_TASK, MAIN_POLICY, BUDGETS[MAIN_TASK], N_ITERATIONS)

VIEWS = {"sparse": "under the budget", "dense": "with all keys"}


def chosen(
    rows: Sequence[Row],
    task: str = MAIN_TASK,
    policy: str = MAIN_POLICY,
    budget: int | None = None,
    n_iterations: int = N_ITERATIONS,
) -> dict[str, list[Row]]:
    """Rows of one setting by arm, without the seed that the learning rates were chosen by."""
    wanted = (task, policy, BUDGETS[task] if budget is None else budget, n_iterations)
    found: dict[str, list[Row]] = {}
    for row in rows:
        setting = (row["task"], row["policy"], row["budget"], row["n_iterations"])
        if setting == wanted and row["seed"] != TUNING_SEED:
            found.setdefault(str(row["name"]), []).append(row)
    order = [f"{arm}{end}" for end in ("", "+anchor") for arm in ARMS]
    return {name: sorted(found[name], key=lambda row: row["seed"]) for name in order if name in found}


def accuracy_table(by_arm: Mapping[str, Sequence[Row]]) -> str:
    """Accuracy under the budget and with all keys, and points gained over the warm model; what it took."""
    headings = ["arm", "n", "budget", "gained", "all keys", "gained", f"responses to {GOAL:.0%}", "lr"]
    body = []
    for name, rows in by_arm.items():
        reached = [found for row in rows if (found := rollouts_to(row, GOAL)) is not None]
        speed = f"{sum(reached) / len(reached):,.0f} ({len(reached)} of {len(rows)})" if reached else ABSENT
        body.append(
            [
                f"`{name}`",
                str(len(rows)),
                mean_sd([row["sparse_accuracy_after"] for row in rows]),
                mean_sd([gained(row, "sparse") for row in rows]),
                mean_sd([row["dense_accuracy_after"] for row in rows]),
                mean_sd([gained(row, "dense") for row in rows]),
                speed,
                f"{rows[0]['lr']:g}",
            ]
        )
    return markdown(headings, body)


LEARNERS = {
    "dense": "nothing is evicted",
    "naive": "all keys, as if the sampler had seen them",
    "tis": "all keys, ratios truncated",
    "mis": "all keys, large ratios masked",
    "sparse_rl": "all keys, responses rejected, the rest reweighted",
    "shadow": "replays what the sampler saw",
    "smd": "replay, and the sparse policy learns from the dense warm model",
    "smd_dense": "replay, and the dense policy is drawn to the sparse one, as published",
    "smd_current": "`smd` with the policy itself as the teacher",
    "distill": "`smd` without the policy gradient",
}
"""What the learner of each arm does, in a few words."""


def summary_table(by_arm: Mapping[str, Sequence[Row]]) -> str:
    """Points gained over the warm model, with the anchor and without, as the README shows them."""
    headings = ["arm", "its learner", "with the anchor: budget", "all keys", "without: budget", "all keys"]
    body = []
    for arm, learner in LEARNERS.items():
        cells = [
            mean_sd([gained(row, view) for row in by_arm[name]]) if name in by_arm else ABSENT
            for name in (f"{arm}+anchor", arm)
            for view in VIEWS
        ]
        if cells != [ABSENT] * len(cells):
            body.append([f"`{arm}`", learner, *cells])
    return markdown(headings, body)


def start_line(by_arm: Mapping[str, Sequence[Row]]) -> str:
    """The warm models of these seeds."""
    by_seed = {row["seed"]: row for rows in by_arm.values() for row in rows}
    rows = list(by_seed.values())
    return (
        f"start ({len(rows)} seeds): {mean_sd([row['sparse_accuracy_before'] for row in rows])} under the "
        f"budget, {mean_sd([row['dense_accuracy_before'] for row in rows])} dense"
    )


def cost_table(by_arm: Mapping[str, Sequence[Row]]) -> str:
    """What training looked like, and what it took. Seconds are of a busy machine: see the block `timing`."""
    headings = ["arm", "masked, %", "gradient norm", "entropy at the end", "KV, MiB", "KL(μ ‖ dense) after"]
    body = [
        [
            f"`{name}`",
            mean_sd([row["masked_fraction"] for row in rows], 100, 2),
            mean_sd([row["grad_norm"] for row in rows], 1, 3),
            mean_sd([row["entropy_last"] for row in rows], 1, 3),
            f"{rows[0]['train_kv_bytes'] / 2**20:.1f}",
            mean_sd([row["sparse_kl_after"] for row in rows], 1, 3),
        ]
        for name, rows in by_arm.items()
    ]
    return markdown(headings, body)


def contrast_tables(by_arm: Mapping[str, Sequence[Row]]) -> list[str]:
    """Paired differences in points, a table for each family of questions, within which p is adjusted."""
    families = {
        "With the anchor": [(f"{first}+anchor", f"{second}+anchor") for first, second in CONTRASTS],
        "Without the anchor": list(CONTRASTS),
        "What the anchor does": [(f"{arm}+anchor", arm) for arm in ARMS],
    }
    parts = []
    for title, pairs in families.items():
        answered = [pair for pair in pairs if len(_common_seeds(by_arm, pair)) >= 2]
        for view, label in VIEWS.items() if answered else ():
            parts += [f"### {title}, accuracy {label}", _contrast_table(by_arm, answered, view)]
    return parts


def _common_seeds(by_arm: Mapping[str, Sequence[Row]], pair: tuple[str, str]) -> set[int]:
    first, second = ({row["seed"] for row in by_arm.get(name, ())} for name in pair)
    return first & second


def _contrast_table(by_arm: Mapping[str, Sequence[Row]], pairs: Sequence[tuple[str, str]], view: str) -> str:
    asked = [contrast(by_arm[first], by_arm[second], f"{view}_accuracy_after") for first, second in pairs]
    body = [
        [
            f"`{c.first}` − `{c.second}`",
            str(c.n),
            f"{100 * c.mean:+.1f} ± {100 * c.half_width:.1f}",
            f"{c.p:.3f}",
            f"{adjusted:.3f}",
        ]
        for c, adjusted in zip(asked, holm(asked), strict=True)
    ]
    return markdown(["difference", "seeds", "points, 95 % interval", "p", "p (Holm)"], body)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rates_table(rows: Sequence[Row]) -> str:
    """What each learning rate leads to with the tuning seed, by the block `rates`."""
    headings = ["arm", "lr", "budget before", "budget after", "dense before", "dense after"]
    names = [f"{view}_accuracy_{moment}" for view in ("sparse", "dense") for moment in ("before", "after")]
    body = [
        [f"`{row['name']}`", f"{row['lr']:g}", *(f"{100 * row[name]:.1f}" for name in names)] for row in rows
    ]
    return markdown(headings, body)


def timing_table(rows: Sequence[Row]) -> str:
    """Seconds of an iteration, by the block `timing`."""
    headings = ["arm", "rollout and scoring, s", "update, s", "both, of naive's"]
    seconds = {
        str(row["name"]): (
            row["rollout_seconds"] / TIMED_ITERATIONS,
            row["update_seconds"] / TIMED_ITERATIONS,
        )
        for row in rows
    }
    naive = sum(seconds["naive"])
    body = [
        [f"`{name}`", f"{rollout:.2f}", f"{update:.2f}", f"{(rollout + update) / naive:.2f}"]
        for name, (rollout, update) in seconds.items()
    ]
    return markdown(headings, body)


def report(rows: Sequence[Row], variances: Sequence[dict]) -> str:
    """Every table that there are rows for."""
    parts = []
    timed = [row for row in rows if row["n_iterations"] == TIMED_ITERATIONS]
    rows = [row for row in rows if row["n_iterations"] != TIMED_ITERATIONS]
    if tuning := [row for row in rows if row["seed"] == TUNING_SEED]:
        parts += [f"## Learning rates, seed {TUNING_SEED}", rates_table(tuning)]
    if any(row["name"] == "naive" for row in timed):
        parts += ["## Seconds of an iteration", timing_table(timed)]
    if variances:
        parts += ["## Gradients of the warm model", variance.table(variances, markdown)]
        parts += [variance.sample_sizes(variances)]
    groups = dict.fromkeys((row["task"], row["policy"], row["budget"], row["n_iterations"]) for row in rows)
    for task, policy, budget, n_iterations in groups:
        by_arm = chosen(rows, task, policy, budget, n_iterations)
        if not by_arm:
            continue
        is_main = (task, policy, budget, n_iterations) == MAIN_SETTING
        parts += [f"## {task}, {policy}, budget {budget}, {n_iterations} iterations", start_line(by_arm)]
        parts += [summary_table(by_arm), accuracy_table(by_arm)]
        if is_main:
            parts += [cost_table(by_arm), *contrast_tables(by_arm)]
    return "\n\n".join(parts)
