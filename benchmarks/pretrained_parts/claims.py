"""Sentences of docs/results/pretrained.md that the recorded cells decide."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, log

from pretrained_parts import tables
from pretrained_parts.results import Group, Results
from pretrained_parts.setting import DENSE
from pretrained_parts.tables import small

from lit_rlkv.evaluation.results import IntervalEstimate

SHOWN_BUDGET = 64
"""Budget of the first claims, of the table by position and of the figure."""
EXACT = 1e-4
"""Largest replay gap in float32 that counts as exact."""
KIND_NAMES = {"recall": "documents", "few_shot": "few-shot questions", "chat": "chats"}


def answers(results: Results) -> Iterator[str]:
    """Return the claims that come first."""
    found, dense = by_accuracy(results, "recall"), results.dense("recall")
    if found and dense:
        (best, group), (worst, other) = found[0], found[-1]
        yield (
            f"**The policy decides whether the model still finds what it read.** With {SHOWN_BUDGET} keys "
            f"a head and documents of {prompt_tokens(dense)} tokens, it answers "
            f"{tables.percent(group.accuracy)} % of {group.n_prompts} questions under `{best}` and "
            f"{tables.percent(other.accuracy)} % under `{worst}`. With all keys it answers "
            f"{tables.percent(dense.accuracy)} %."
        )
    yield from best_on_both(results)
    found = by_kl(results, "chat")
    if found:
        (best, group), (worst, other) = found[0], found[-1]
        yield (
            "**Every policy changes the distribution of the next token.** In chats under "
            f"{SHOWN_BUDGET} keys the KL to the model with all keys is {small(group.kl)} (`{best}`) to "
            f"{small(other.kl)} (`{worst}`) nats per token."
        )
    shares = sequence_shares(results)
    if shares:
        n_rows, n_tokens, values = shares
        low, high = extremes(values)
        yield (
            f"**A learner with all keys cannot reweight whole responses.** After {n_tokens:,} sampled tokens "
            f"{n_rows} sequences count like {n_rows * values[low]:.1f} (`{low}`) to "
            f"{n_rows * values[high]:.1f} (`{high}`)."
        )
    yield from gap(results)


def best_on_both(results: Results) -> Iterator[str]:
    """Return whether one policy is best on documents and on few-shot questions, at the shown budget."""
    orders = {kind: by_accuracy(results, kind) for kind in ("recall", "few_shot")}
    if not all(orders.values()):
        return
    right = {kind: {policy: group.accuracy for policy, group in found} for kind, found in orders.items()}
    texts, shots = right["recall"], right["few_shot"]
    of_texts, of_shots = (
        [policy for policy, share in found.items() if share == next(iter(found.values()))]
        for found in (texts, shots)
    )
    if not {*of_texts, *of_shots} <= texts.keys() & shots.keys():
        return
    if {*of_texts} & {*of_shots}:
        yield "**The best policy on documents is also the best on few-shot questions.**"
        return
    yield (
        f"**No policy is best everywhere.** On documents {_are_best(of_texts)}, with "
        f"{_percents(shots, of_texts)} % of the few-shot questions. On those {_are_best(of_shots)} "
        f"({_percents(shots, of_shots[:1])} %), with {_percents(texts, of_shots)} % on documents."
    )


def _are_best(policies: Sequence[str]) -> str:
    names = " and ".join(f"`{policy}`" for policy in policies)
    return f"{names} {'is' if len(policies) == 1 else 'are'} best"


def _percents(accuracies: Mapping[str, IntervalEstimate | None], policies: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(str(tables.percent(accuracies[policy])) for policy in policies))


def gap(results: Results) -> Iterator[str]:
    """Return whether replay is exact in float32, and what exceeds it."""
    rows = results.rollouts("long")
    if not rows:
        return
    largest = {policy: row["gap"]["max"] for policy, row in rows.items()}
    above = [f"`{policy}` ({gap:.1e})" for policy, gap in largest.items() if gap >= EXACT]
    n_tokens = max(row["cell"]["tokens"] for row in rows.values())
    measured = f"over responses of {n_tokens:,} tokens in float32"
    if above:
        yield f"**Replay is not within {EXACT:g} nats for {', '.join(above)}** {measured}."
    else:
        yield (
            f"**Replay is exact on this model, too.** The largest gap of {len(rows)} policies {measured} is "
            f"{max(largest.values()):.1e} nats."
        )


def prompts(results: Results) -> Iterator[str]:
    """Return how many prompts of each kind there are, and how long they are."""
    groups = {name: results.dense(kind) for kind, name in KIND_NAMES.items()}
    sizes = [f"{g.n_prompts} {name} of {prompt_tokens(g)} tokens" for name, g in groups.items() if g]
    if sizes:
        yield f"**The prompts** are {', '.join(sizes)}. The benchmark makes them from a seed."


def kept(results: Results, kind: str, dense: Group) -> Iterator[str]:
    """Return at which budget each policy comes within the interval of the model with all keys."""
    reached: dict[int, list[str]] = {}
    for policy in results.policies:
        for budget in results.budgets:
            group = results.group(kind, policy, budget)
            if group and group.accuracy and dense.accuracy and group.accuracy.value >= dense.accuracy.low:
                reached.setdefault(budget, []).append(f"`{policy}`")
                break
    if reached:
        listed = [f"{budget} keys for {', '.join(names)}" for budget, names in sorted(reached.items())]
        yield f"The smallest budget with an accuracy within the interval of *dense* is {'; '.join(listed)}."


def rounding(results: Results) -> Iterator[str]:
    """Return the gaps in bfloat16 beside those of the model without eviction."""
    dense, rows = results.rollout("bf16", DENSE), results.rollouts("bf16")
    if dense and rows:
        means = {policy: row["gap"]["mean"] for policy, row in rows.items()}
        low, high = extremes(means)
        yield (
            "**In bfloat16 the gap is about the rounding of the layers.** Logits are float32. Without "
            "eviction, decoding and one forward over the same text differ by "
            f"{dense['gap']['mean']:.3f} nats on average and by {dense['gap']['max']:.2f} at most. Under "
            f"eviction the average is {means[low]:.3f} (`{low}`) to {means[high]:.3f} (`{high}`), the "
            f"largest gap {max(row['gap']['max'] for row in rows.values()):.2f}."
        )


def clipping(results: Results) -> Iterator[str]:
    """Return what the corrections of single tokens keep, clip and drop."""
    rows = results.rollouts("long")
    if not rows:
        return
    n = max(int(n) for row in rows.values() for n in row["by_length"])
    ends = {policy: row["by_length"][str(n)] for policy, row in rows.items()}
    tis = {policy: end["ess_tis"] for policy, end in ends.items()}
    clipped = [100 * end["clipped"] for end in ends.values()]
    dropped = [100 * end["masked"] for end in ends.values()]
    low, high = extremes(tis)
    yield (
        f"**Weights of single tokens keep most of the sample**: {tis[low]:.2f} (`{low}`) to "
        f"{tis[high]:.2f} (`{high}`) under *tis*, which clips {min(clipped):.0f} to {max(clipped):.0f} % "
        f"of the tokens; *mis* drops {min(dropped):.0f} to {max(dropped):.0f} %. They ignore that the "
        "tokens before were sampled otherwise, too."
    )


def order(results: Results, kind: str) -> str | None:
    """Return the policies, best first, by their mean over budgets; None if cells are missing."""
    means = {}
    for policy in results.policies:
        groups = [group for budget in results.budgets if (group := results.group(kind, policy, budget))]
        if len(groups) != len(results.budgets):
            return None
        means[policy] = sum(map(_cost, groups)) / len(groups)
    shown: Callable[[float], str] = _shown_kl if kind == "chat" else _shown_share
    return ", ".join(f"`{policy}` {shown(means[policy])}" for policy in sorted(means, key=means.__getitem__))


def _cost(group: Group) -> float:
    """Return the share of wrong answers, or the log of the KL in chats."""
    return 1 - group.accuracy.value if group.accuracy else log(max(group.kl, 1e-9))


def _shown_kl(mean_log: float) -> str:
    return small(exp(mean_log))


def _shown_share(cost: float) -> str:
    return f"{100 * (1 - cost):.0f} %"


def by_accuracy(results: Results, kind: str) -> list[tuple[str, Group]]:
    """Return the policies with their cells at the shown budget, most accurate first."""
    return sorted(_shown(results, kind), key=lambda pair: _cost(pair[1]))


def by_kl(results: Results, kind: str) -> list[tuple[str, Group]]:
    """Return the policies with their cells at the shown budget, lowest KL first."""
    return sorted(_shown(results, kind), key=lambda pair: pair[1].kl)


def _shown(results: Results, kind: str) -> list[tuple[str, Group]]:
    return [(p, group) for p in results.policies if (group := results.group(kind, p, SHOWN_BUDGET))]


def sequence_shares(results: Results) -> tuple[int, int, dict[str, float]] | None:
    """Return sequences, tokens and each policy's effective share of sequences; None without rollouts."""
    rows = results.rollouts("long")
    if not rows:
        return None
    n_tokens = max(int(n) for row in rows.values() for n in row["by_length"])
    shares = {policy: row["by_length"][str(n_tokens)]["ess_sequence"] for policy, row in rows.items()}
    return next(iter(rows.values()))["cell"]["rows"], n_tokens, shares


def extremes(values: dict[str, float]) -> tuple[str, str]:
    """Return the names of the lowest and the highest value."""
    return min(values, key=values.__getitem__), max(values, key=values.__getitem__)


def prompt_tokens(group: Group) -> str:
    """Return the range of the prompts' lengths."""
    lengths = [n for row in group.rows for n in row["n_prompt_tokens"]]
    return f"{min(lengths)}–{max(lengths)}" if min(lengths) < max(lengths) else str(lengths[0])
