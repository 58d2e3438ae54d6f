"""The tables of the study, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence

from study_parts import measured
from study_parts.analysis import (
    N_FIRST,
    VIEWS,
    Contrast,
    Row,
    contrast,
    gained,
    holm,
    lowest_at_first,
    mean_sd,
    pairs_of,
    rollouts_to,
)
from study_parts.plan import ARMS, TUNING_SEED

from lit_rlkv.reporting.tables import markdown_table

ABSENT = "–"
GOAL = 0.75
"""Mean reward of the rollouts whose first reaching is counted."""

CONTRASTS = (
    ("naive", "dense"),
    ("tis", "naive"),
    ("mis", "naive"),
    ("sparse_rl", "naive"),
    ("shadow", "naive"),
    ("shadow", "tis"),
    ("shadow", "mis"),
    ("shadow", "sparse_rl"),
    ("shadow", "dense"),
    ("smd", "shadow"),
    ("smd_dense", "shadow"),
    ("distill", "shadow"),
    ("smd", "distill"),
    ("smd", "smd_current"),
)
"""Questions put to every comparison: with the anchor and without it, under the budget and with all keys."""

LEARNERS = {
    "dense": "nothing is evicted, a control",
    "naive": "all keys, as if the sampler had seen them",
    "tis": "all keys, ratios truncated",
    "mis": "all keys, tokens with ratios outside of [0.5, 2] masked, the rest weighed",
    "sparse_rl": "all keys, tokens and responses rejected, the rest reweighted",
    "shadow": "replays what the sampler saw",
    "smd": "replay, and the sparse policy learns from the SFT model with all keys",
    "smd_dense": "replay, and the dense policy is drawn to the sparse one: the paper's formula and weight",
    "smd_current": "`smd` with the policy itself as the teacher",
    "distill": "`smd` without the policy gradient",
}
"""Short descriptions of each arm's learner."""


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of one comparison by arm, in the order of the plan, each by seed."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(str(row["name"]), []).append(row)
    order = [f"{arm}{end}" for end in ("+anchor", "") for arm in ARMS]
    return {name: found[name] for name in order if name in found}


def accuracy_table(arms: Mapping[str, Sequence[Row]]) -> str:
    """Accuracy under the budget and with all keys, and points gained over the SFT model; what it took."""
    headings = ["arm", "n", "budget", "gained", "all keys", "gained", f"responses to {GOAL:.0%}", "lr"]
    body = []
    for name, rows in arms.items():
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
    return markdown_table(headings, body)


def summary_table(arms: Mapping[str, Sequence[Row]]) -> str:
    """Points gained over the SFT model, with the anchor and without, as docs/results/study.md shows them."""
    headings = ["arm", "its learner", "with the anchor: budget", "all keys"]
    ends = ["+anchor"]
    if any(not name.endswith("+anchor") for name in arms):
        headings += ["without: budget", "all keys"]
        ends += [""]
    body = []
    for arm, learner in LEARNERS.items():
        cells = [
            mean_sd([gained(row, view) for row in arms[name]]) if name in arms else ABSENT
            for name in (f"{arm}{end}" for end in ends)
            for view in VIEWS
        ]
        if cells != [ABSENT] * len(cells):
            body.append([f"`{arm}`", learner, *cells])
    return markdown_table(headings, body)


COMPARED = ("naive", "tis", "shadow", "distill", "smd")
"""Arms of the comparisons beside the main one."""


def places_table(groups: Mapping[str, Iterable[Row]]) -> str:
    """Points gained under the budget by arms of each comparison, and by smd with all keys.

    With the anchor, where a comparison has arms that have it.
    """
    headings = ["comparison", "seeds", "start, %", *(f"`{arm}`" for arm in COMPARED), "`smd`, all keys"]
    body = []
    for title, rows in groups.items():
        arms = by_arm(rows)
        end = "+anchor" if any(name.endswith("+anchor") for name in arms) else ""
        compared = [arms.get(f"{arm}{end}", ()) for arm in COMPARED]
        by_seed = {row["seed"]: row for mine in compared for row in mine}
        if len([mine for mine in compared if mine]) < 2:
            continue
        cells = [(mine, "sparse") for mine in compared] + [(compared[-1], "dense")]
        body.append(
            [
                title,
                str(len(by_seed)),
                mean_sd([row["sparse_accuracy_before"] for row in by_seed.values()]),
                *(mean_sd([gained(row, view) for row in mine]) if mine else ABSENT for mine, view in cells),
            ]
        )
    return markdown_table(headings, body)


def start_line(arms: Mapping[str, Sequence[Row]]) -> str:
    """The SFT models of these seeds."""
    by_seed = {row["seed"]: row for rows in arms.values() for row in rows}
    rows = list(by_seed.values())
    return (
        f"start ({len(rows)} seeds): {mean_sd([row['sparse_accuracy_before'] for row in rows])} under the "
        f"budget, {mean_sd([row['dense_accuracy_before'] for row in rows])} dense"
    )


def seeds_table(arms: Mapping[str, Sequence[Row]]) -> str:
    """Every seed by itself, in their order: points gained, how far its reward fell, how soon it rose."""
    headings = ["arm", "seeds", *(f"gained {view}" for view in VIEWS.values())]
    headings += [f"lowest reward of {N_FIRST} iterations", f"responses to {GOAL:.0%}"]
    body = [
        [
            f"`{name}`",
            ", ".join(str(row["seed"]) for row in rows),
            *(", ".join(f"{100 * gained(row, view):+.1f}" for row in rows) for view in VIEWS),
            ", ".join(f"{lowest_at_first(row):.2f}" for row in rows),
            "; ".join(ABSENT if (n := rollouts_to(row, GOAL)) is None else f"{n:,}" for row in rows),
        ]
        for name, rows in arms.items()
    ]
    return markdown_table(headings, body)


def cost_table(arms: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of training. Its seconds are of a busy machine; see the block `timing`."""
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
        for name, rows in arms.items()
    ]
    return markdown_table(headings, body)


def contrast_tables(arms: Mapping[str, Sequence[Row]]) -> list[str]:
    """Paired differences in points, a table for each family of questions; p within it and over all."""
    families = {
        "With the anchor": [(f"{first}+anchor", f"{second}+anchor") for first, second in CONTRASTS],
        "Without the anchor": list(CONTRASTS),
        "What the anchor does": [(f"{arm}+anchor", arm) for arm in ARMS],
    }
    asked = {
        f"### {title}, accuracy {label}": [
            contrast(arms[first], arms[second], f"{view}_accuracy_after")
            for first, second in pairs
            if len(pairs_of(arms.get(first, ()), arms.get(second, ()))) >= 2
        ]
        for title, pairs in families.items()
        for view, label in VIEWS.items()
    }
    over_all = iter(holm([one for family in asked.values() for one in family]))
    parts = []
    for title, family in asked.items():
        if family:
            parts += [title, _contrast_table(family, [next(over_all) for _ in family])]
    return parts


def _contrast_table(family: Sequence[Contrast], over_all: Sequence[float]) -> str:
    body = [
        [
            f"`{c.first}` − `{c.second}`",
            str(c.n),
            f"{100 * c.mean:+.1f} ± {100 * c.half_width:.1f}",
            *(f"{p:.3f}" for p in (c.p, adjusted, over_families)),
        ]
        for c, adjusted, over_families in zip(family, holm(family), over_all, strict=True)
    ]
    headings = ["difference", "seeds", "points, 95 % interval", "p", "p (Holm)", "p (Holm, all tables)"]
    return markdown_table(headings, body)


def rates_table(rows: Sequence[Row]) -> str:
    """Return the results of each learning rate with the tuning seed, from the block `rates`."""
    headings = ["arm", "lr", "budget before", "budget after", "dense before", "dense after"]
    headings += [f"lowest reward of {N_FIRST} iterations"]
    names = [f"{view}_accuracy_{moment}" for view in ("sparse", "dense") for moment in ("before", "after")]
    body = [
        [
            f"`{row['name']}`",
            f"{row['lr']:g}",
            *(f"{100 * row[name]:.1f}" for name in names),
            f"{lowest_at_first(row):.2f}",
        ]
        for row in rows
    ]
    return markdown_table(headings, body)


def report(
    groups: Mapping[str, Iterable[Row]],
    tuning: Sequence[Row],
    rounds: Sequence[Row],
    variances: Sequence[dict],
    exposures: Sequence[dict],
) -> str:
    """Every table that there are rows for; `groups` are comparisons by title."""
    parts = []
    if tuning:
        parts += [f"## Learning rates, seed {TUNING_SEED}", rates_table(tuning)]
    if rounds:
        parts += ["## Seconds of an iteration", measured.timing_table(rounds)]
    if variances:
        parts += ["## Gradients of the SFT model", measured.variance_table(variances)]
        parts += [measured.sample_sizes(variances)]
    if exposures:
        parts += ["## What eviction touches", measured.exposure_table(exposures)]
    parts += ["## Every comparison, with the anchor where nothing else is said", places_table(groups)]
    for title, rows in groups.items():
        if arms := by_arm(rows):
            parts += [f"## {title}", start_line(arms), summary_table(arms), accuracy_table(arms)]
            parts += [seeds_table(arms), cost_table(arms), *contrast_tables(arms)]
    return "\n\n".join(parts)
