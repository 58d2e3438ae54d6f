"""An audit as a page of text, as plain values, and as a picture."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lit_rlkv.auditing.causes import EXACT, TOKENS_PER_PASS, Audit, uneven_heads
from lit_rlkv.diagnostics.distributions import view_overlap
from lit_rlkv.diagnostics.importance_ratios import importance_ratios, off_policy, replay_gap
from lit_rlkv.diagnostics.position_bins import as_lists, log_ratios_by_position
from lit_rlkv.models.packing import passes
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.tables import make_table

N_WORST, N_CAUSES, N_UNEVEN, N_BINS = 5, 6, 5, 8
"""Tokens, causes, rows with uneven heads, and bins of positions that are shown."""
N_BROKEN, N_REASONS = 20, 5
"""Rows that are named of those that could not be compared, and reasons of the others."""
LEAST_DRAWN = 1e-7
"""Nats: a smaller gap is drawn as this."""
MAX_LABEL = 50
"""Characters of a cause beside its bar."""


def as_values(audit: Audit, places: Sequence[str], broken: Sequence[str]) -> dict[str, Any]:
    """Return an audit as plain values.

    Args:
        places: file and line of each row.
        broken: what is wrong with the rows that could not be compared.
    """
    own, sampler, mask = audit.own.logps, audit.sampler, audit.is_sampled
    log_ratio = (own - sampler).masked_fill(~mask, 0.0)
    statistics = off_policy(own, sampler, mask) | importance_ratios(log_ratio, mask)
    names = {"k1": "kl", "k3": "k3_kl", "ess": "rollout_is_eff_sample_size"}
    gaps = replay_gap(own, sampler, mask)
    worst = log_ratio.abs().masked_fill(~mask, -1.0).flatten().topk(min(N_WORST, int(mask.sum())))
    values: dict[str, Any] = {
        "rows": len(audit.rows),
        "tokens": int(mask.sum()),
        "left_out": [*broken],
        "sampling": audit.sampling.options,
        "is_replayed": audit.has_record,
        "rows_without_evictions": sum(row.evicted_at is None for row in audit.rows),
        "gap": {name.removeprefix("kv/replay_gap_"): float(value) for name, value in gaps.items()},
        **{name: float(statistics[key]) for name, key in names.items()},
        "overlap_p05": _overlap_p05(audit),  # before the causes, which change the model's dtype
        "by_position": as_lists(log_ratios_by_position(log_ratio, mask)),
        "worst": [
            {
                "row": places[row],
                "position": place,
                "token": int(audit.rows[row].response_ids[place]),
                "sampler": float(sampler[row, place]),
                "learner": float(own[row, place]),
            }
            for row, place in (divmod(each, own.shape[1]) for each in worst.indices.tolist())
        ],
    }
    uneven = ((place, uneven_heads(row)) for place, row in zip(places, audit.rows, strict=True))
    return values | {
        "causes": [{"cause": each.cause, "leaves": each.gap} for each in audit.trials],
        "found": None if audit.found is None else audit.found.cause,
        "steps": [{"cause": each.cause, "leaves": each.gap} for each in audit.steps],
        "grows": audit.grows,
        "uneven_heads": [f"{place}: {said}" for place, said in uneven if said is not None],
    }


def _overlap_p05(audit: Audit) -> float | None:
    """Return the 5th percentile of the overlap with all keys; None without a record of evictions."""
    if not audit.has_record:
        return None
    parts = [part for _, part in passes(audit.rollout, TOKENS_PER_PASS)]
    found = [view_overlap(audit.model, part, part.temperature)[part.response_mask] for part in parts]
    return float(torch.cat(found).quantile(0.05))


def screen(values: Mapping[str, Any]) -> RenderableType:
    """Return an audit for people."""
    return Group(*(Text(line) if isinstance(line, str) else line for line in _lines(values)))


def _lines(values: Mapping[str, Any]) -> Iterator[str | Table]:
    gap, left_out = values["gap"], values["left_out"]
    given = " ".join(f"{name}={value:g}" for name, value in values["sampling"].items() if value is not None)
    yield f"{values['tokens']:,} sampled tokens of {values['rows']} rows; {given}"
    if left_out:
        yield f"{len(left_out)} rows of the file cannot be compared:"
        yield from (f"  {each}" for each in left_out[:N_BROKEN])
        alike: dict[str, list[str]] = {}
        for each in left_out[N_BROKEN:]:  # by the reason without its numbers
            alike.setdefault(re.sub(r"\d+", "", each.partition(": ")[2]), []).append(each)
        groups = sorted(alike.values(), key=len, reverse=True)
        yield from (f"  and {len(same)} more like {same[0]}" for same in groups[:N_REASONS])
        if n_others := sum(map(len, groups[N_REASONS:])):
            yield f"  and {n_others} for other reasons"
    how = "evictions replayed" if values["is_replayed"] else "all keys seen"
    if values["is_replayed"] and values["rows_without_evictions"]:
        how += f" (none logged in {values['rows_without_evictions']} of {values['rows']} rows)"
    sizes = ", ".join(f"{name} {gap[name]:.2g}" for name in ("mean", "p99", "max"))
    yield f"|log π − log μ| in nats, {how}: {sizes}"
    overlap = values["overlap_p05"]
    more = "" if overlap is None else f"; overlap with all keys, 5th percentile {overlap:.2f}"
    yield f"k1 {values['k1']:.2g}, k3 {values['k3']:.2g}, effective share of tokens {values['ess']:.3f}{more}"
    columns = ("position", "n_response_tokens", "k3", "abs_log_ratio_p99")
    bins = zip(*(values["by_position"][name] for name in columns), strict=True)
    cells = [[f"{position:,}", f"{n:,}", f"{k3:.2g}", f"{tail:.2g}"] for position, n, k3, tail in bins]
    yield make_table(("position", "tokens", "k3", "p99 of the gap"), cells[:: -(-len(cells) // N_BINS)])
    if gap["mean"] <= EXACT:
        yield "sampler and learner agree to float error: nothing to explain"
        return
    yield make_table(
        ("worst tokens", "position", "token", "sampler", "learner"),
        [
            [each["row"], *(f"{each[name]}" for name in ("position", "token"))]
            + [f"{each[name]:.3f}" for name in ("sampler", "learner")]
            for each in values["worst"]
        ],
    )
    yield make_table(
        ("the sampler's log-probs would be those ...", "leaves, nats"),
        [[each["cause"], f"{each['leaves']:.2g}"] for each in values["causes"][:N_CAUSES]],
    )
    if values["found"] is not None:
        yield f"most likely: the log-probs are those {values['found']}"
        steps = values["steps"]
        if len(steps) > 1 or (steps and steps[0]["leaves"] > EXACT):
            left = ", then ".join(f"{each['leaves']:.2g}" for each in steps)
            yield f"which leaves {left} nats" + (" unexplained" if steps[-1]["leaves"] > EXACT else "")
    else:
        yield "none of the causes that were tried explains the gap"
        if values["grows"]:
            unlogged = "" if not values["is_replayed"] else " in the rows without evictions"
            yield f"it grows along the response{unlogged}, as under eviction; log when keys were evicted"
    yield from (
        f"KV heads differ in {each}: a key too many or too few?" for each in values["uneven_heads"][:N_UNEVEN]
    )


def picture(audit: Audit) -> Figure:
    """Draw the gap by position, as logged and under its cause, and what each cause leaves."""
    figure = Figure(figsize=(style.FULL_WIDTH, style.HEIGHT), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = [(audit.own, "as logged", style.VERMILLION)]
    if audit.found is not None:
        curves.append((audit.found, audit.found.cause, style.BLUE))
    for trial, label, color in curves:
        log_ratio = (trial.logps - audit.sampler).nan_to_num()
        found = as_lists(log_ratios_by_position(log_ratio, audit.is_sampled))
        tail = [max(value or 0.0, LEAST_DRAWN) for value in found["abs_log_ratio_p99"]]
        left.plot(found["position"], tail, color=color, lw=2, label=label)
    style.style_axes(left)
    left.set_yscale("log")
    style.label_axes(left, "Position in the response", "|log π − log μ|, p99 (nats)")
    style.finish(figure, left, n_columns=1)
    bars = [audit.own, *audit.trials[:N_CAUSES]][::-1]
    right.barh([each.cause[:MAX_LABEL] for each in bars], [each.gap for each in bars], color=style.BLUE)
    style.style_axes(right)
    right.set_xscale("log")
    right.set_xlim(LEAST_DRAWN, 3 * max(each.gap for each in bars) + LEAST_DRAWN)
    style.label_axes(right, "Mean |log π − log μ| that is left (nats)", "")
    return figure
