"""Sizes chosen from memory: tokens in a pass of the learner, and rows in an evaluation."""

import logging
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lit_rlkv.config import AUTO
from lit_rlkv.distributed.ranks import ranks_of
from lit_rlkv.experience.memory_needs import rollout_needs
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.adapters import lora_layers, use_adapter
from lit_rlkv.models.backbone import (
    hidden_states,
    is_sharded,
    optional_setting,
    text_config,
    token_positions,
)
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.replay import dense_evicted_at
from lit_rlkv.runs.context import RunContext

log = logging.getLogger(__name__)
FOR_PASSES, FOR_CACHE = 0.5, 0.3
"""Shares of the memory beside weights and optimizer for a pass of the learner, and for the cache of an
evaluation. The rest is for temporary tensors, logits and fragmentation."""
MAX_ROWS = 512
"""Most rows that an evaluation samples at a time."""
LONGEST_PROBE = 64
"""Columns of the longest row whose memory is measured; longer rows follow, as c + a·n + b·n²."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def tokens_per_pass(
    context: RunContext,
    module: nn.Module,
    backbone: PreTrainedModel,
    adapter: str | None,
    *,
    n_graphs: int = 1,
) -> int:
    """Return `fabric.tokens_per_pass`, or what fits into the memory for the longest prompt and response.

    It follows from the memory that the device has, not from what is free now, so a resumed run has the same
    passes on the same machine. Of several ranks, the one with the least memory decides; all must call this.

    Args:
        module: everything that is in memory and that trains.
        backbone: the backbone that learns.
        adapter: its adapter that learns; None: it has none.
        n_graphs: forwards of a pass that wait for their backward at the same time.
    """
    given = context.cfg.fabric.tokens_per_pass
    if given != AUTO:
        return int(given)
    n_columns = max(context.sizes.prompts) + max(context.cfg.rollout.max_new_tokens, *context.sizes.solutions)
    with context.fabric.autocast(), use_adapter(lora_layers(backbone), adapter):
        fixed, per_row = bytes_of_pass(
            backbone, n_columns, checkpoints_layers=context.cfg.roles.gradient_checkpointing
        )
    room = int(FOR_PASSES * free_memory(context, module)) // n_graphs - fixed
    n_rows = max(room // per_row, 1)
    found = _least(context, min(TOKENS_PER_PASS, n_rows * n_columns))
    log.info("fabric.tokens_per_pass=auto: %d", found)
    return found


def evaluation_rows(
    context: RunContext, module: nn.Module, backbone: PreTrainedModel, caches: Sequence[CacheSpec]
) -> int:
    """Return `evaluation.batch_size`, or the rows whose caches fit into the memory; at most `MAX_ROWS`.

    Of several ranks, the one with the least memory decides; all must call this.

    Args:
        module: everything that is in memory and that trains.
        backbone: the backbone that samples.
        caches: the caches to sample with, one at a time.
    """
    given = context.cfg.evaluation.batch_size
    if given != AUTO:
        return int(given)
    shape = (1, max(context.sizes.prompts))
    needed = max(
        sum(rollout_needs(backbone, cache, shape, context.cfg.rollout, group=1).values()) for cache in caches
    )
    found = _least(context, max(min(MAX_ROWS, int(FOR_CACHE * free_memory(context, module)) // needed), 1))
    log.info("evaluation.batch_size=auto: %d", found)
    return found


def _least(context: RunContext, number: int) -> int:
    """Return the smallest of the ranks' numbers."""
    return -ranks_of(context.fabric).all_reduce_max(-number)


def free_memory(context: RunContext, module: nn.Module) -> int:
    """Return the bytes of this process's share of the device, less weights, gradients and two moments."""
    device = context.fabric.device
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        n_nodes = getattr(context.fabric.strategy, "num_nodes", 1)  # a single process has no such number
        total = machine_memory() * n_nodes // context.fabric.world_size
    sizes = [
        (_local_bytes(parameter, context.fabric.world_size), parameter) for parameter in module.parameters()
    ]
    learned = sum(3 * n_bytes for n_bytes, parameter in sizes if parameter.requires_grad)
    return max(total - sum(n_bytes for n_bytes, _ in sizes) - learned, 0)


def _local_bytes(parameter: nn.Parameter, world_size: int) -> int:
    shares = world_size if isinstance(parameter, DTensor) else 1
    return parameter.numel() * parameter.element_size() // shares


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container's limit."""
    limits = [Path(name).read_text().strip() for name in CGROUP_LIMITS if Path(name).is_file()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdecimal())])


def bytes_of_pass(backbone: PreTrainedModel, n_columns: int, *, checkpoints_layers: bool) -> tuple[int, int]:
    """Return the bytes that a forward keeps for its backward pass: once, and for each row of `n_columns`.

    What is kept once are copies of weights, such as those that autocast makes.
    """
    n_positions = optional_setting(text_config(backbone), "max_position_embeddings") or LONGEST_PROBE
    n = max(min(LONGEST_PROBE, n_positions) // 4, 1)
    short, middle, long = (saved_bytes(backbone, columns) for columns in (n, 2 * n, 4 * n))
    slopes = (middle - short) / n, (long - middle) / (2 * n)
    square = max((slopes[1] - slopes[0]) / (3 * n), 0.0)
    linear = slopes[0] - 3 * square * n
    fixed = max(short - linear * n - square * n**2, 0.0)
    saved = linear * n_columns + square * n_columns**2
    if checkpoints_layers:  # the inputs of all layers, and one layer that is computed again
        n_layers, dim = text_config(backbone).num_hidden_layers, text_config(backbone).hidden_size
        saved = saved / n_layers + n_layers * n_columns * dim * backbone.dtype.itemsize
    return int(fixed), max(int(saved), 1)


def _places(backbone: nn.Module) -> set[int]:
    """Return the addresses of the weights that are whole now."""
    return {p.untyped_storage().data_ptr() for p in backbone.parameters() if not isinstance(p, DTensor)}


def saved_bytes(backbone: PreTrainedModel, n_columns: int) -> int:
    """Return the bytes of the tensors that the forward of one row saves for its backward pass."""
    weights = None if is_sharded(backbone) else _places(backbone)
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # or memory could be reused within the forward

    def count(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        # A sharded layer has its whole weights only during its forward.
        if place not in (_places(backbone) if weights is None else weights):
            found[place] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    input_ids = torch.zeros(1, n_columns, dtype=torch.long, device=backbone.device)
    attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden_states(
            backbone, input_ids, token_positions(attention_mask), evicted_at=dense_evicted_at(attention_mask)
        )
    return sum(found.values())
