"""Explain an out-of-memory error: the bytes that each part needs, and the settings that change them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from transformers import PreTrainedModel

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import head_dims, n_kv_heads, text_config
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


@dataclass(frozen=True)
class Need:
    """One part of the memory that a phase needs."""

    what: str
    factors: Mapping[str, int]
    """Named counts; their product is the number of bytes."""
    helps: Sequence[str]
    """Settings to change, best first."""

    @property
    def n_bytes(self) -> int:
        return prod(self.factors.values())

    def __str__(self) -> str:
        product = " × ".join(f"{number} {name}" for name, number in self.factors.items())
        return f"{human_bytes(self.n_bytes):>9}  {self.what} = {product}"


def rollout_needs(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
) -> list[Need]:
    """Return the memory needs of `generate` beside the model, the largest first.

    It is an estimate if layers differ in size.

    Args:
        prompts_shape: prompts at a time, and tokens of the longest one.
        group: responses to each prompt.
    """
    config = text_config(model)
    n_prompts, n_prompt_columns = prompts_shape
    n_rows = n_concurrent_rows(n_prompts, group, settings.max_rows)
    n_columns = n_prompt_columns + settings.max_new_tokens
    layers, heads = {"layers": int(config.num_hidden_layers)}, {"KV heads": n_kv_heads(model)}
    itemsize = _computes_in(model).itemsize
    limit = "null, all at once" if settings.max_rows is None else settings.max_rows
    fewer = f"set rollout.max_rows below {n_rows} (now {limit})"
    if n_rows == group:
        fewer = f"lower algorithm.group_size={group}"
    shorter = f"lower rollout.max_new_tokens={settings.max_new_tokens}"
    smaller = [shorter, "sample from a cache that evicts (cache.policy, correction)"]
    values = {"dims": max(head_dims(model)), "bytes": itemsize}
    needs = [
        Need(
            "KV cache",
            {"of keys and values": 2, **layers, "rows": n_rows, **heads}
            | {"slots": cache.n_slots(n_columns), **values},
            [*(smaller if cache.is_dense else [f"lower cache.budget={cache.budget}"]), fewer],
        ),
        Need(
            "record of evictions",
            {**layers, "rows and responses": n_rows + n_prompts * group, **heads}
            | {"columns": n_columns, "bytes": EVICTED_AT_BYTES},
            [shorter, f"lower rollout.n_prompts={settings.n_prompts} or algorithm.group_size={group}"],
        ),
        Need(
            "logits of a step",
            {"rows": n_rows, "tokens": int(config.vocab_size), "bytes": max(itemsize, 4) + SAMPLING_BYTES},
            [fewer],
        ),
    ]
    if settings.replay_routing:
        routers = routers_of(model)
        needs.append(
            Need(
                "record of experts",
                {"routers": len(routers), "rows and responses": n_rows + n_prompts * group}
                | {"experts": max(router.k for router in routers), "columns": n_columns}
                | {"bytes": expert_dtype(routers).itemsize},
                [shorter, fewer],
            )
        )
    policy = cache.make_policy()
    if policy is not None and policy.sees_queries:
        needs.append(
            Need(
                "latest queries",
                {**layers, "rows": n_rows, "query heads": int(config.num_attention_heads)}
                | {"in the window": cache.window, **values},
                [f"lower cache.window={cache.window}", fewer],
            )
        )
    if settings.top_k is not None:
        needs.append(
            Need(
                "record of sampling masks, at most",
                {"responses": n_prompts * group, "tokens": settings.max_new_tokens}
                | {"ids": min(settings.top_k, int(config.vocab_size)), "bytes": KEPT_ID_BYTES},
                [f"lower rollout.top_k={settings.top_k}", shorter],
            )
        )
    elif settings.top_p < 1:
        needs.append(
            Need(
                "sorted logits of a step",
                {"rows": n_rows, "tokens": int(config.vocab_size), "bytes": SORTING_BYTES},
                ["set rollout.top_k", fewer],
            )
        )
    if (n_packed := packed_size(model)) and not settings.compile_layers:
        needs.append(Need("weights packed for decoding", {"elements": n_packed, "bytes": itemsize}, []))
    return sorted(needs, key=lambda need: need.n_bytes, reverse=True)


def explain_rollout(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
) -> str:
    """Return the message for a rollout: its memory needs and the settings to change."""
    needs = rollout_needs(model, cache, prompts_shape, settings, group)
    helps = dict.fromkeys(step for need in needs for step in need.helps)
    n_prompts, n_columns = prompts_shape
    return "\n".join(
        [
            f"out of memory in the rollout: {group} responses of up to "
            f"{settings.max_new_tokens} tokens to each of {n_prompts} prompts of up to {n_columns}, cache "
            f"{cache.label}. Beside the weights it takes",
            *(f"  {need}" for need in needs),
            f"What helps, the most first: {'; '.join(helps)}.",
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
        *([] if roles.checkpoints_layers else ["set roles.gradient_checkpointing=true"]),
        f"lower rollout.max_new_tokens={settings.max_new_tokens}",
        "train fewer parameters (roles=hydra, roles.rank)",
    ]
    return (
        f"out of memory in the update, {_pass_size(shape, tokens_per_pass)}, and {n_trained:,} parameters "
        f"that train; {_any_of(helps)}"
    )


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


def _computes_in(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of activations and cache."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
