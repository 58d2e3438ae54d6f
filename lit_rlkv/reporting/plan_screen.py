"""A plan as one screen of text, or as plain values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lit_rlkv.models.backbone import n_kv_heads, optional_setting, text_config
from lit_rlkv.planning.plan import Change, Planner, Row
from lit_rlkv.reporting.tables import make_table
from lit_rlkv.units import human_bytes, human_seconds

HEADINGS = ("cache", "rows", "rollout peak", "update peak", "tokens/s", "rollout", "update", "")
HELP = "change one of the settings above"
NO_HELP = "no setting helps; take a smaller model, a larger card, or more of them and fabric.strategy=fsdp2"
LEAST_SHOWN = 2**26
"""Bytes from which a part is named by itself."""


def screen(
    planner: Planner, rows: Sequence[Row], chosen: Row, changes: Sequence[Change], command: str
) -> RenderableType:
    """Return the plan for people, in about twenty lines.

    Args:
        chosen: the row of the configured cache.
        changes: settings that would help.
        command: that starts the run.
    """
    lines: list[Text | Table] = [*_title(planner)]
    lines.append(make_table(HEADINGS, [_cells(planner, row, row is chosen) for row in rows]))
    said = [
        f"rollout: {_parts(chosen.rollout)}",
        f"update: {_parts(chosen.update)}",
        f"the longest sequence that learns has {planner.longest():,} tokens{_positions(planner)}"
        if planner.longest()
        else "no sequence learns here",
        *map(str, changes),
        *_remarks(planner, chosen),
        command if chosen.fits else f"it does not fit: {HELP if changes else NO_HELP}",
    ]
    return Group(*lines, *(Text(each) for each in said))


def _title(planner: Planner) -> Iterator[Text]:
    cfg, policy = planner.cfg, planner.policy
    config = text_config(policy)
    n_weights = sum(weight.numel() for name, weight in policy.named_parameters() if "lora_" not in name)
    trained = "all weights" if planner.trains_all else f"LoRA of rank {cfg.roles.rank}"
    precision = cfg.fabric.quantization or cfg.fabric.precision
    yield Text(
        f"{cfg.model.path or type(policy).__name__}: {_count(n_weights)} parameters, "
        f"{config.num_hidden_layers} layers of {n_kv_heads(policy)} KV heads; {trained}, {precision}, "
        f"roles.gradient_checkpointing={str(planner.checkpoints).lower()}"
    )
    is_one = planner.n_ranks == 1
    card = f"{'' if is_one else f'{planner.n_ranks} × '}{planner.card.name}"
    yield Text(
        f"{card}: {human_bytes(planner.card.usable)} usable; {planner.n_responses} responses"
        f"{'' if is_one else ' on each'} of {cfg.rollout.max_new_tokens:,} tokens after prompts of "
        f"{planner.n_prompt:,}, groups of {cfg.algorithm.group_size}"
    )


def _cells(planner: Planner, row: Row, is_chosen: bool) -> list[str]:
    n_tokens = planner.n_responses * planner.n_ranks * planner.cfg.rollout.max_new_tokens
    room = planner.card.usable
    times = ["–"] * 3
    if row.rollout_s is not None and row.update_s is not None:
        times = [
            f"{n_tokens / row.rollout_s:,.0f}",
            human_seconds(row.rollout_s),
            human_seconds(row.update_s),
        ]
    totals = [sum(parts.values()) for parts in (row.rollout, row.update)]
    peaks = [f"{human_bytes(n)}{' (too much)' if n > room else ''}" for n in totals]
    note = "<- this config" if is_chosen else ""
    return [row.cache.label, str(row.n_rows or "–"), *peaks, *times, note]


def _positions(planner: Planner) -> str:
    """Return what the model itself allows, if that is less."""
    most = optional_setting(text_config(planner.policy), "max_position_embeddings")
    return f"; the model has positions for {most:,}" if most and most < planner.longest() else ""


def _parts(parts: Mapping[str, int]) -> str:
    shown = {what: n for what, n in parts.items() if n >= LEAST_SHOWN} or parts
    ordered = sorted(shown.items(), key=lambda part: part[1], reverse=True)
    return ", ".join(f"{what} {human_bytes(n)}" for what, n in ordered)


def _count(n_weights: int) -> str:
    return f"{n_weights / 1e9:.3g}B" if n_weights >= 1e8 else f"{n_weights / 1e6:.3g}M"


def _remarks(planner: Planner, chosen: Row) -> Iterator[str]:
    if most := planner.most_keys(chosen):
        each = (f"{budget:,} with {n_rows} rows at a time" for n_rows, budget in most.items())
        yield f"the largest cache.budget that fits: {', '.join(each)}"
    if planner.card.is_gpu:
        yield f"in host memory: records of all responses, {human_bytes(planner.host_bytes)}"
    if not planner.cache.is_dense and planner.cache.n_slots(planner.n_columns) >= planner.n_columns:
        yield f"nothing is evicted: the cache holds all {planner.n_columns:,} tokens of a sequence"
    if planner.card.bandwidth is None:
        yield "times are planned for GPUs alone"
    else:
        yield "times are planned, from what one H100 reached with a model of 1.5B; elsewhere not measured"


def as_values(
    planner: Planner, rows: Sequence[Row], chosen: Row, changes: Sequence[Change]
) -> dict[str, Any]:
    """Return the plan for programs; sizes are bytes, times seconds."""
    return {
        "card": planner.card.name,
        "usable": planner.card.usable,
        "n_responses": planner.n_responses,
        "n_prompt_tokens": planner.n_prompt,
        "longest_sequence": planner.longest(),
        "host_bytes": planner.host_bytes,
        "rows": [
            {
                "cache": row.cache.label,
                "budget": None if row.cache.is_dense else row.cache.budget,
                "is_chosen": row is chosen,
                "fits": row.fits,
                "rows": row.n_rows,
                "tokens_per_pass": row.tokens_per_pass,
                "rollout_bytes": row.rollout,
                "update_bytes": row.update,
                "rollout_s": row.rollout_s,
                "update_s": row.update_s,
            }
            for row in rows
        ],
        "most_keys": planner.most_keys(chosen),
        "changes": [
            {
                "override": one.override,
                "fits": one.fits,
                "rows": one.n_rows,
                "longest_sequence": one.longest,
            }
            for one in changes
        ],
    }
