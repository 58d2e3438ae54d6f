"""Bytes that a rollout needs beside the models, by what they are for."""

from collections.abc import Sequence
from operator import itemgetter

import torch
from transformers import PreTrainedModel

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kernels.quantization import group_of, quantized_bytes, record_bytes
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.kvcache.value_norms import MOST_NUMBERS
from lit_rlkv.models.backbone import head_dims, layer_kinds, n_kv_heads, optional_setting, text_config
from lit_rlkv.models.packed_linear import packed_size
from lit_rlkv.models.routing import expert_dtype, routers_of
from lit_rlkv.rollout.generate import n_concurrent_rows
from lit_rlkv.rollout.mask_record import MAX_UNPACKED, N_SLOTS
from lit_rlkv.types import times_dtype

CACHE, PREFILL, STEP = "KV cache", "activations of prompts", "logits of a step"
GROWTH = "growth of a layer"
RECORDS = ("record of evictions", "record of codes", "record of experts")
"""Needs of a record: of the rows at a time on a GPU, and on a CPU of all responses beside them."""
LOGIT_BYTES = {True: 8, False: 12}
"""Bytes beside each logit while a token is sampled, on a GPU and elsewhere."""
SORTING_BYTES = 26
"""Bytes per logit to choose by `top_p`: sorted logits, ids, probabilities, sums, and bits of the record."""
KEPT_ID_BYTES = 4
PROBABILITY_BYTES, MOST_PROBABILITIES = 13, 2**26
"""Bytes of a probability while prompts are read under a policy that adds up attention, and most of them."""
COLUMN_BYTES, ATTENTION_BYTES = 8, 4
"""Bytes of a slot's column, and of the attention that it has received."""


def rollout_needs(
    model: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    settings: RolloutConfig,
    group: int,
    dtype: torch.dtype | None = None,
    *,
    is_gpu: bool | None = None,
    n_responses: int | None = None,
) -> dict[str, int]:
    """Return the bytes that `generate` needs beside the model, by what they are for, the largest first.

    Prompts are read before the first step, so the larger of `PREFILL` and `STEP` counts for the peak. It is
    an estimate if layers differ in size.

    Args:
        prompts_shape: prompts at a time, and tokens of the longest one.
        group: responses to each prompt.
        dtype: of activations and cache; None: that of the model, or of autocast.
        is_gpu: True for a device with memory of its own; None: as that of the model.
        n_responses: of an iteration, if there are more than to the prompts at a time.
    """
    dtype = compute_dtype(model) if dtype is None else dtype
    config, kinds = text_config(model), [kind for kind in layer_kinds(model) if kind.attends]
    n_prompts, n_prompt_columns = prompts_shape
    n_columns = n_prompt_columns + settings.max_new_tokens
    n_rows = n_concurrent_rows(n_prompts, group, settings.max_rows)
    n_heads, itemsize = n_kv_heads(model), dtype.itemsize
    n_responses = n_prompts * group if n_responses is None else n_responses
    is_gpu = model.device.type != "cpu" if is_gpu is None else is_gpu
    n_tokens, dim = int(config.vocab_size), max(head_dims(model))
    is_full = [kind.window is None or kind.window >= n_columns for kind in kinds]
    # Rows that have ended wait in host memory, which is that of a CPU's device.
    n_ended = 0 if is_gpu else n_responses
    n_tables = sum(is_full) * n_rows + len(is_full) * n_ended  # a window needs none to decode
    slots = _slots(cache, kinds, n_columns, n_prompt_columns)
    of_key = 2 * quantized_bytes(dim, cache.dtype, dtype)
    needs = {
        CACHE: sum(slots) * n_rows * n_heads * of_key,
        "record of evictions": n_tables * n_heads * n_columns * times_dtype(n_columns).itemsize,
        STEP: n_rows * n_tokens * (itemsize + LOGIT_BYTES[is_gpu]),
    }
    if cache.is_dense and kinds:  # it grows, and for a while a layer has both sizes
        needs[GROWTH] = max(slots) * n_rows * n_heads * of_key
    else:
        needs["columns of slots"] = sum(slots) * n_rows * n_heads * COLUMN_BYTES
    n_read = min(n_prompt_columns, settings.prefill_chunk or n_prompt_columns)
    if optional_setting(config, "num_experts_per_tok") is not None:
        experts = [(name, weight) for name, weight in model.named_parameters() if ".experts." in name]
        if any("lora_" in name for name, _ in experts):  # their sum with the adapter's product, of a layer
            n_numbers = sum(weight.numel() for name, weight in experts if "lora_" not in name)
            needs["experts with adapters"] = n_numbers // int(config.num_hidden_layers) * itemsize
    policy = cache.make_policy()
    tracks = policy is not None and policy.tracks_attention is not None
    needs[PREFILL] = _prefill_bytes(model, n_prompts, n_read, n_prompt_columns, itemsize, tracks=tracks)
    if tracks:
        needs["attention of slots"] = sum(slots) * n_rows * n_heads * ATTENTION_BYTES
    if policy is not None and policy.sees_queries:
        n_query_heads = int(config.num_attention_heads)
        needs["latest queries"] = len(kinds) * n_rows * n_query_heads * cache.window * dim * itemsize
    if policy is not None and policy.reads_projection:
        n_query_heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        n_products = n_rows * max(*slots, n_prompt_columns) * n_query_heads // n_heads * hidden
        n_numbers = min(n_products, MOST_NUMBERS) + 2 * n_query_heads * dim * hidden
        needs["values after a layer's projection"] = n_numbers * itemsize
    if cache.dtype is not None:
        n_bytes = 2 * record_bytes(dim, cache.dtype, group_of(cache.dtype, dtype))
        needs["record of codes"] = len(kinds) * (n_rows + n_ended) * n_heads * n_columns * n_bytes
        needs["numbers of a layer's codes"] = 2 * max(slots) * n_rows * n_heads * dim * itemsize
    if settings.replay_routing:
        needs["record of experts"] = (n_rows + n_ended) * n_columns * _expert_bytes(model)
    if settings.top_k is not None:
        n_ids = max(n_rows, n_ended) * settings.max_new_tokens * min(settings.top_k, n_tokens)
        needs["record of sampling masks, at most"] = n_ids * KEPT_ID_BYTES
    elif settings.top_p < 1:
        # While a token is chosen, or while the bits of many steps become ids.
        unpacked = 2 * min(N_SLOTS * n_rows * n_tokens, MAX_UNPACKED)
        sorting = n_rows * n_tokens * (itemsize + LOGIT_BYTES[is_gpu] + SORTING_BYTES)
        needs[STEP] = max(sorting, n_rows * n_tokens * itemsize + unpacked)
        needs["bits of sampling masks"] = N_SLOTS * n_rows * (n_tokens // 8)
    is_packed = not (is_gpu or settings.compile_layers) and dtype == torch.float32
    if is_packed and (n_packed := packed_size(model)):
        needs["weights packed for decoding"] = n_packed * itemsize
    return dict(sorted(needs.items(), key=itemgetter(1), reverse=True))


def _prefill_bytes(
    model: PreTrainedModel, n_prompts: int, n_read: int, n_columns: int, itemsize: int, *, tracks: bool
) -> int:
    """Return the bytes of activations while prompts are read: those of an MLP, or of attention.

    Args:
        n_read: tokens of a prompt that are read at a time.
        n_columns: tokens of a prompt.
        tracks: True if the policy adds up attention.
    """
    config, hidden = text_config(model), int(text_config(model).hidden_size)
    width = int(optional_setting(config, "intermediate_size") or 4 * hidden)
    n_chosen = optional_setting(config, "num_experts_per_tok")
    if n_chosen is None:  # gate, up and their product; an adapter adds its own output
        n_wide = (3 + any("lora_" in name for name, _ in model.named_parameters())) * width
    else:  # gate and up, their activation and product, and the input of each expert
        n_wide = n_chosen * (4 * int(optional_setting(config, "moe_intermediate_size") or width) + hidden)
    of_mlp = n_prompts * n_read * (n_wide + 4 * hidden) * itemsize
    n_pairs = n_prompts * int(config.num_attention_heads) * n_read * n_columns
    return max(of_mlp, tracks * PROBABILITY_BYTES * min(n_pairs, MOST_PROBABILITIES))


def _expert_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the experts of a token; without weights by the config and the names of modules."""
    if model.device.type != "meta":
        routers = routers_of(model)
        return len(routers) * max(router.k for router in routers) * expert_dtype(routers).itemsize
    config, names = text_config(model), (name for name, _ in model.named_modules())
    n_routers = sum(name.endswith(".experts") for name in names)
    n_chosen = optional_setting(config, "num_experts_per_tok")
    if n_routers == 0 or n_chosen is None:
        raise ValueError(f"{type(model).__name__} has no experts to record; leave replay_routing off")
    return 2 * n_routers * int(n_chosen)


def _slots(cache: CacheSpec, kinds: Sequence[LayerKind], n_columns: int, n_prompt: int) -> list[int]:
    """Return the slots of a row in each layer with attention."""
    budgets = iter(cache.layer_budgets(sum(kind.in_profile for kind in kinds)))
    found = []
    for kind in kinds:
        own = cache.n_slots(n_columns, n_prompt, next(budgets) if kind.in_profile else None)
        found.append(own if kind.window is None or kind.window >= n_columns else kind.window)
    return found


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of activations and cache."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
