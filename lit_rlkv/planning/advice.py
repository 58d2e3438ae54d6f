"""Explain an out-of-memory error: the bytes that each part needs, and the settings that change them."""

from collections.abc import Mapping, Sequence

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
    "experts with adapters": "roles.target_modules",
    "latest queries": "cache.window, rollout.max_rows",
    "values after a layer's projection": "cache.policy_options.value_norms, rollout.max_rows",
    "bits of sampling masks": "rollout.top_k, rollout.max_rows",
    "record of sampling masks, at most": "rollout.top_k, rollout.max_new_tokens",
    "weights packed for decoding": "rollout.compile_layers, which needs none",
}
"""The needs of a rollout, each with the settings that change it."""


def explain_code_record(
    needs: Mapping[str, int],
    plain: Mapping[str, int],
    cache: CacheSpec,
    settings: RolloutConfig,
    n_prompt: int,
) -> str | None:
    """Return the warning that the record of the codes takes more than the codes save; None if it does not.

    Args:
        needs: of a rollout with codes.
        plain: of the same without.
    """
    saved, record = plain[CACHE] - needs[CACHE], needs.get("record of codes", 0)
    if record <= saved:
        return None
    n_columns = n_prompt + settings.max_new_tokens
    return (
        f"cache.dtype={cache.dtype} saves {human_bytes(saved)} of keys and values, and the record of its "
        f"codes takes {human_bytes(record)}: rows of more than {n_columns * saved // record} tokens need "
        f"less memory without it; lower rollout.max_new_tokens={settings.max_new_tokens}, or use null"
        + ", or cache.dtype=int4, which has the smallest record in 16 bit"
        * (cache.dtype != "int4")
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


def explain_scoring(shape: tuple[int, int], settings: RolloutConfig, tokens_per_pass: int) -> str:
    """Return the message for a rollout of `shape` (rows, columns)."""
    return _explain_pass("scoring", shape, tokens_per_pass, [], settings)


def explain_update(
    roles: Roles, shape: tuple[int, int], settings: RolloutConfig, tokens_per_pass: int
) -> str:
    """Return the message for a rollout of `shape` (rows, columns)."""
    n_trained = sum(p.numel() for p in roles.parameters() if p.requires_grad)
    helps = keeping_less(roles.checkpoints_layers, roles.backbone("policy").device)
    helps.append("train fewer parameters (roles=hydra, roles.rank)")
    beside = f", and {n_trained:,} parameters that train"
    return _explain_pass("the update", shape, tokens_per_pass, helps, settings, beside)


def _explain_pass(
    where: str,
    shape: tuple[int, int],
    most: int,
    helps: Sequence[str],
    settings: RolloutConfig,
    end: str = "",
) -> str:
    n_rows, n_columns = shape
    n_tokens = min(most, n_rows * n_columns)
    smaller = [f"set fabric.tokens_per_pass below {n_tokens}"] if n_tokens >= 2 * n_columns else []
    others = ", ".join((*smaller, *helps))
    return (
        f"out of memory in {where}, {max(n_tokens // n_columns, 1)} of {n_rows} sequences of up to "
        f"{n_columns} tokens at a time{end}; {others}{', or ' if others else ''}lower "
        f"rollout.max_new_tokens={settings.max_new_tokens}"
    )


def keeping_less(checkpoints: Checkpoints, device: torch.device) -> list[str]:
    """Return the setting with which the backward pass keeps less on the device; none if there is no more."""
    if not checkpoints:
        return ["set roles.gradient_checkpointing=true"]
    may_move = device.type != "cpu" and checkpoints != "host"
    return ["set roles.gradient_checkpointing=host"] if may_move else []
