"""Tables of docs/results/pretrained.md."""

from collections.abc import Callable, Iterable
from math import exp, isnan, log

from pretrained_parts.results import Group, Results, Row, bin_labels
from pretrained_parts.setting import DENSE, KINDS

from lit_rlkv.evaluation.results import IntervalEstimate
from lit_rlkv.reporting.tables import markdown_table

MISSING = "–"
SHOWN_BUDGET = 64
"""Budget of the table by position and of the figure."""


def report(results: Results) -> str:
    """Return all tables under their titles; those whose cells are missing are left out."""
    blocks = {row["cell"]["block"] for row in results.rows}
    parts = []
    for kind in (kind for kind in KINDS if kind in blocks):
        dense = results.dense(kind)
        parts.append(f"## {kind}" + (f", perplexity with all keys {dense.perplexity:.2f}" if dense else ""))
        parts.append(distances(results, kind))
        if kind == "chat":
            parts += [kl_intervals(results, kind), positions(results, kind, SHOWN_BUDGET)]
        else:
            parts.append(accuracy(results, kind))
    if results.rollouts("long"):
        parts += ["## What reweighting keeps", weights(results), "## Memory and speed", costs(results)]
    if blocks - set(KINDS):
        parts += ["## Replay gap", gaps(results)]
    if means := rankings(results):
        parts += ["## Means over budgets, best first", markdown_table(["prompts", "best first"], means)]
    return "\n\n".join(parts)


def _row(name: str, cells: Iterable[str | None]) -> list[str]:
    return [name if name == DENSE else f"`{name}`", *(MISSING if cell is None else cell for cell in cells)]


def _by_budget(results: Results, kind: str, read: Callable[[Group], str | None]) -> list[list[str]]:
    """Return a line for each policy, a cell for each budget."""
    rows = []
    for policy in (*results.policies, *results.profiled):
        groups = [results.group(kind, policy, budget) for budget in results.budgets]
        if any(groups):
            rows.append(_row(policy, (group and read(group) for group in groups)))
    return rows


def percent(found: IntervalEstimate | None) -> str | None:
    """Return a share in percent with its interval."""
    return found and f"{100 * found.value:.0f} ({100 * found.low:.0f}–{100 * found.high:.0f})"


def accuracy(results: Results, kind: str) -> str:
    """Return right answers in percent with 95 % Wilson intervals, by policy and budget."""
    headings = ["policy", *(f"budget {budget}" for budget in results.budgets)]
    body = _by_budget(results, kind, lambda group: percent(group.accuracy))
    dense = results.dense(kind)
    if dense:
        body.insert(0, _row(DENSE, [percent(dense.accuracy), *[""] * (len(results.budgets) - 1)]))
    return markdown_table(headings, body)


def distances(results: Results, kind: str) -> str:
    """Return KL per token, 5th percentile of the overlap, perplexity, by policy and budget."""

    def read(group: Group) -> str:
        return f"{small(group.kl)} / {group.overlap_p05:.2f} / {group.perplexity:.2f}"

    headings = ["policy", *(f"budget {budget}" for budget in results.budgets)]
    return markdown_table(headings, _by_budget(results, kind, read))


def kl_intervals(results: Results, kind: str) -> str:
    """Return the mean KL over prompts with its interval, by policy and budget."""

    def read(group: Group) -> str | None:
        found = group.kl_interval
        return found and f"{small(found.value)} ({small(found.low)}–{small(found.high)})"

    headings = ["policy", *(f"budget {budget}" for budget in results.budgets)]
    return markdown_table(headings, _by_budget(results, kind, read))


def positions(results: Results, kind: str, budget: int) -> str:
    """Return KL by response position, by policy."""
    body = []
    for policy in results.policies:
        group = results.group(kind, policy, budget)
        if group:
            body.append(_row(policy, (None if isnan(kl) else small(kl) for kl in group.kl_by_position)))
    return markdown_table(["policy", *bin_labels()], body)


def rankings(results: Results) -> list[list[str]]:
    """Return the policies by kind of prompts, best first: by mean accuracy, in chats by the KL's mean log."""
    rows = []
    for kind in KINDS:
        means = {}
        for policy in results.policies:
            groups = [group for budget in results.budgets if (group := results.group(kind, policy, budget))]
            if len(groups) == len(results.budgets):
                means[policy] = sum(map(_cost, groups)) / len(groups)
        if len(means) == len(results.policies) > 0:
            best_first = sorted(means, key=means.__getitem__)
            shown = {
                p: small(exp(m)) if kind == "chat" else f"{100 * (1 - m):.0f} %" for p, m in means.items()
            }
            rows.append([kind, ", ".join(f"`{policy}` {shown[policy]}" for policy in best_first)])
    return rows


def _cost(group: Group) -> float:
    """Return the share of wrong answers, or the log of the KL in chats."""
    return 1 - group.accuracy.value if group.accuracy else log(max(group.kl, 1e-9))


def weights(results: Results) -> str:
    """Return what reweighting keeps, by policy and response length."""
    rows = results.rollouts("long")
    lengths = sorted({int(n) for row in rows.values() for n in row["by_length"]})
    headings = ["policy", *(f"sequences, {n:,} tokens" for n in lengths)]
    headings += [f"tokens (tis), {n:,} tokens" for n in (lengths[0], lengths[-1])]
    headings += ["clipped by tis, %", "dropped by mis, %"]
    body = []
    for policy, row in rows.items():
        found = [row["by_length"][str(n)] for n in lengths]
        cells: list[str | None] = [f"{one['ess_sequence']:.2f}" for one in found]
        cells += [
            *(f"{one['ess_tis']:.2f}" for one in (found[0], found[-1])),
            *(f"{100 * found[-1][k]:.1f}" for k in ("clipped", "masked")),
        ]
        body.append(_row(policy, cells))
    return markdown_table(headings, body)


def gaps(results: Results) -> str:
    """Return |replayed − sampled| log-probs in float32 and bfloat16, by policy."""
    blocks = {"long": "float32", "bf16": "bfloat16"}
    headings = ["policy", *(f"{name}, {kind}" for name in blocks.values() for kind in ("mean", "p99", "max"))]
    body = []
    for policy in (DENSE, *results.policies):
        found = [results.rollout(block, policy) for block in blocks]
        if any(found):
            cells = [f"{row['gap'][k]:.1e}" if row else None for row in found for k in ("mean", "p99", "max")]
            body.append(_row(policy, cells))
    return markdown_table(headings, body)


def costs(results: Results) -> str:
    """Return the cache of a sequence and the speed of the long rollouts, by policy."""
    body = []
    for policy in (DENSE, *results.policies):
        row = results.rollout("long", policy)
        if row:
            body.append(_row(policy, [mib(row), f"{tokens_per_second(row):.0f}"]))
    return markdown_table(["policy", "KV cache of a sequence, MiB", "tokens per second"], body)


def mib(row: Row) -> str:
    """Return the bytes of a rollout's cache for one sequence, in MiB."""
    return f"{row['kv_bytes'] / row['cell']['rows'] / 2**20:.1f}"


def tokens_per_second(row: Row) -> float:
    """Return the sampled tokens of a rollout per second."""
    return row["n_tokens"] / row["rollout_seconds"]


def small(value: float) -> str:
    """Return a number with two or three significant digits, without an exponent."""
    if abs(value) < 5e-4:
        return "0"
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"
