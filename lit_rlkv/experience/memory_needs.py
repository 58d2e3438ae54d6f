"""Explain an out-of-memory error: the bytes that each part needs, and the settings that change them."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import torch
from transformers import PreTrainedModel

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kernels.quantization import group_of, quantized_bytes, record_bytes
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.backbone import head_dims, layer_kinds, n_kv_heads, text_config
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.packed_linear import packed_size
from lit_rlkv.models.routing import expert_dtype, routers_of
from lit_rlkv.rollout.generate import n_concurrent_rows
from lit_rlkv.units import human_bytes

EVICTED_AT_BYTES = 4
SAMPLING_BYTES = 12
"""Bytes per logit while a token is sampled: log-prob, noise and probability in float32."""
SORTING_BYTES = 26
"""Bytes per logit to choose by `top_p`: sorted logits, ids, probabilities, sums, and bits of the record."""
KEPT_ID_BYTES = 4
CACHE = "KV cache"
RECORDS = ("record of evictions", "record of codes", "record of experts")
"""Needs that are allocated in full before the first token."""
SETTINGS = {
    CACHE: "cache.dtype, cache.budget, cache.protect_prompt or, of a dense one, cache.policy and "
    "correction; rollout.max_rows",
    "record of evictions": "rollout.max_new_tokens, rollout.n_prompts or algorithm.group_size",
    "record of codes": "cache.dtype, rollout.max_new_tokens, rollout.n_prompts or algorithm.group_size",
    "numbers of a layer's codes": "cache.budget, rollout.max_rows",
    "logits of a step": "rollout.max_rows",
    "record of experts": "rollout.max_new_tokens, rollout.max_rows",
    "latest queries": "cache.window, rollout.max_rows",
    "record of sampling masks, at most": "rollout.top_k, rollout.max_new_tokens",
    "sorted logits of a step": "rollout.top_k, rollout.max_rows",
    "weights packed for decoding": "rollout.compile_layers, which needs none",
}
"""The needs of a rollout, each with the settings that change it."""


def rollout_needs(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
) -> dict[str, int]:
    """Return the bytes that `generate` needs beside the model, by what they are for, the largest first.

    It is an estimate if layers differ in size.

    Args:
        prompts_shape: prompts at a time, and tokens of the longest one.
        group: responses to each prompt.
    """
    config = text_config(model)
    n_prompts, n_prompt_columns = prompts_shape
    n_columns = n_prompt_columns + settings.max_new_tokens
    n_rows, n_responses = n_concurrent_rows(n_prompts, group, settings.max_rows), n_prompts * group
    n_layers, n_tokens, dim = int(config.num_hidden_layers), int(config.vocab_size), max(head_dims(model))
    n_heads, itemsize = n_kv_heads(model), compute_dtype(model).itemsize
    windows = [kind.window for kind in layer_kinds(model) if kind.window is not None]
    budgets = cache.layer_budgets(sum(kind.in_profile for kind in layer_kinds(model)))
    n_slots = sum(cache.n_slots(n_columns, n_prompt_columns, budget) for budget in budgets)  # of all layers
    own_slots = cache.n_slots(n_columns, n_prompt_columns)
    n_slots += sum(window if window < n_columns else own_slots for window in windows)
    needs = {
        CACHE: 2 * n_slots * n_rows * n_heads * quantized_bytes(dim, cache.dtype, compute_dtype(model)),
        "record of evictions": n_layers * (n_rows + n_responses) * n_heads * n_columns * EVICTED_AT_BYTES,
        "logits of a step": n_rows * n_tokens * (max(itemsize, 4) + SAMPLING_BYTES),
    }
    if cache.dtype is not None:
        n_bytes = 2 * record_bytes(dim, cache.dtype, group_of(cache.dtype, compute_dtype(model)))
        needs["record of codes"] = n_layers * (n_rows + n_responses) * n_heads * n_columns * n_bytes
        most_slots = max(cache.n_slots(n_columns, n_prompt_columns, n) for n in (*budgets, None))
        needs["numbers of a layer's codes"] = 2 * most_slots * n_rows * n_heads * dim * itemsize
    if settings.replay_routing:
        routers = routers_of(model)
        n_experts = len(routers) * max(router.k for router in routers)
        needs["record of experts"] = (
            n_experts * (n_rows + n_responses) * n_columns * expert_dtype(routers).itemsize
        )
    policy = cache.make_policy()
    if policy is not None and policy.sees_queries:
        n_query_heads = int(config.num_attention_heads)
        needs["latest queries"] = n_layers * n_rows * n_query_heads * cache.window * dim * itemsize
    if settings.top_k is not None:
        n_ids = n_responses * settings.max_new_tokens * min(settings.top_k, n_tokens)
        needs["record of sampling masks, at most"] = n_ids * KEPT_ID_BYTES
    elif settings.top_p < 1:
        needs["sorted logits of a step"] = n_rows * n_tokens * SORTING_BYTES
    if (n_packed := packed_size(model)) and not settings.compile_layers:
        needs["weights packed for decoding"] = n_packed * itemsize
    return dict(sorted(needs.items(), key=itemgetter(1), reverse=True))


def explain_code_record(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
) -> str | None:
    """Return the warning that the record of the codes takes more than the codes save; None if it does not."""
    asked = prompts_shape, settings, group
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
            f"{cache.label}. Beside the weights, and the activations of the prompts, which "
            "rollout.prefill_chunk bounds, it takes",
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


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of activations and cache."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
