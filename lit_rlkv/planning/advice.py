"""Explain an out-of-memory error: the bytes that each part needs, and the settings that change them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.hydra import Roles
from lit_rlkv.planning.needs import CACHE, PREFILL, STEP, rollout_needs
from lit_rlkv.units import human_bytes

SETTINGS = {
    CACHE: "cache.dtype, cache.budget, cache.protect_prompt or, of a dense one, cache.policy and "
    "correction; rollout.max_rows",
    "record of evictions": "rollout.max_new_tokens, rollout.max_rows or rollout.n_prompts",
    "record of codes": "cache.dtype, rollout.max_new_tokens, rollout.max_rows or rollout.n_prompts",
    "numbers of a layer's codes": "cache.budget, rollout.max_rows",
    STEP: "rollout.top_k, rollout.max_rows",
    "record of experts": "rollout.max_new_tokens, rollout.max_rows",
    PREFILL: "rollout.prefill_chunk, rollout.max_rows",
    "growth of a layer": "cache.policy, rollout.max_rows",
    "columns of slots": "cache.budget, rollout.max_rows",
    "attention of slots": "cache.policy, rollout.max_rows",
    "latest queries": "cache.window, rollout.max_rows",
    "bits of sampling masks": "rollout.top_k, rollout.max_rows",
    "record of sampling masks, at most": "rollout.top_k, rollout.max_new_tokens",
    "weights packed for decoding": "rollout.compile_layers, which needs none",
}
"""The needs of a rollout, each with the settings that change it."""


def explain_code_record(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return the warning that the record of the codes takes more than the codes save; None if it does not."""
    asked = prompts_shape, settings, group, dtype
    needs = rollout_needs(model, cache, *asked)
    saved = rollout_needs(model, replace(cache, dtype=None), *asked)[CACHE] - needs[CACHE]
    record = needs.get("record of codes", 0)
    if record <= saved:
        return None
    n_columns = prompts_shape[1] + settings.max_new_tokens
    return (
        f"cache.dtype={cache.dtype} saves {human_bytes(saved)} of keys and values, and the record of its "
        f"codes takes {human_bytes(record)}: rows of more than {n_columns * saved // record} tokens need "
        f"less memory without it; lower rollout.max_new_tokens={settings.max_new_tokens}, or use null, or "
        "cache.dtype=int4, which has the smallest record in 16 bit"
    )


def explain_rollout(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
) -> str:
    """Return the message for a rollout: its memory needs and the settings to change."""
    needs = rollout_needs(model, cache, prompts_shape, settings, group)
    n_prompts, n_columns = prompts_shape
    return "\n".join(
        [
            f"out of memory in the rollout: {group} responses of up to "
            f"{settings.max_new_tokens} tokens to each of {n_prompts} prompts of up to {n_columns}, cache "
            f"{cache.label}. Beside the weights it takes",
            *(f"{human_bytes(n):>11}  {what}; change {SETTINGS[what]}" for what, n in needs.items()),
        ]
    )


def explain_scoring(
    shape: tuple[int, int], settings: RolloutConfig, tokens_per_pass: int, *, stacks_passes: bool
) -> str:
    """Return the message for a rollout of `shape` (rows, columns)."""
    helps = [
        *_smaller_passes(shape, tokens_per_pass),
        *(["set roles.stack_passes=false"] if stacks_passes else []),
        f"lower rollout.max_new_tokens={settings.max_new_tokens}",
    ]
    return f"out of memory in scoring, {_pass_size(shape, tokens_per_pass)}; {_any_of(helps)}"


def explain_update(
    roles: Roles, shape: tuple[int, int], settings: RolloutConfig, tokens_per_pass: int
) -> str:
    """Return the message for a rollout of `shape` (rows, columns)."""
    n_trained = sum(p.numel() for p in roles.parameters() if p.requires_grad)
    helps = [
        *_smaller_passes(shape, tokens_per_pass),
        *keeping_less(roles.checkpoints_layers, roles.backbone("policy").device),
        f"lower rollout.max_new_tokens={settings.max_new_tokens}",
        "train fewer parameters (roles=hydra, roles.rank)",
    ]
    return (
        f"out of memory in the update, {_pass_size(shape, tokens_per_pass)}, and {n_trained:,} parameters "
        f"that train; {_any_of(helps)}"
    )


def keeping_less(checkpoints: Checkpoints, device: torch.device) -> list[str]:
    """Return the setting with which the backward pass keeps less on the device; none if there is no more."""
    if not checkpoints:
        return ["set roles.gradient_checkpointing=true"]
    may_move = device.type != "cpu" and checkpoints != "host"
    return ["set roles.gradient_checkpointing=host"] if may_move else []


def _any_of(helps: Sequence[str]) -> str:
    return ", or ".join(part for part in (", ".join(helps[:-1]), helps[-1]) if part)


def _pass_size(shape: tuple[int, int], tokens_per_pass: int) -> str:
    n_rows, n_columns = shape
    n_at_once = min(n_rows, max(tokens_per_pass // n_columns, 1))
    return f"{n_at_once} of {n_rows} sequences of up to {n_columns} tokens at a time"


def _smaller_passes(shape: tuple[int, int], tokens_per_pass: int) -> list[str]:
    """Return the setting that makes passes smaller; none if a pass is one sequence already."""
    n_rows, n_columns = shape
    n_tokens = min(tokens_per_pass, n_rows * n_columns)
    return [f"set fabric.tokens_per_pass below {n_tokens}"] if n_tokens >= 2 * n_columns else []
