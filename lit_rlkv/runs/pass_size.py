"""Sizes chosen from memory: tokens in a pass of the learner, and rows in an evaluation."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.config import AUTO
from lit_rlkv.experience.memory_needs import (
    CACHE,
    RECORDS,
    SETTINGS,
    compute_dtype,
    explain_code_record,
    rollout_needs,
)
from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.shadow_attention.blocks import LONG
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import TILE, Checkpoints, runs_in_tiles
from lit_rlkv.models.backbone import head_dims, n_kv_heads, text_config
from lit_rlkv.models.kv_scorer import kv_scorer_of
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.rollout.decoder import FIRST_TOKENS
from lit_rlkv.runs.run import Run
from lit_rlkv.units import human_bytes

log = logging.getLogger(__name__)
FOR_PASSES, FOR_CACHE = 0.5, 0.3
"""Shares of the memory beside weights and optimizer for a pass of the learner, and for the cache of an
evaluation. The rest is for temporary tensors, logits and fragmentation."""
MAX_ROWS = 512
"""Most rows that an evaluation samples at a time."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def tokens_per_pass(run: Run, module: nn.Module, backbone: PreTrainedModel, *, n_graphs: int = 1) -> int:
    """Return `fabric.tokens_per_pass`, or what should fit into the memory of the device.

    After a pass that did not fit, `Run.pass_limit` bounds it. Of several ranks, the one with the least
    memory decides; all must call this.

    Args:
        module: everything that is in memory and that trains.
        backbone: the backbone that learns.
        n_graphs: forwards of a pass that wait for their backward at the same time.
    """
    given = run.cfg.fabric.tokens_per_pass
    if given != AUTO:
        return int(given)
    n_columns = max(run.sizes.prompts) + max(run.cfg.rollout.max_new_tokens, *run.sizes.solutions)
    with run.fabric.autocast():
        per_row = bytes_of_row(backbone, n_columns, checkpoints_layers=run.cfg.roles.gradient_checkpointing)
    n_rows = int(FOR_PASSES * free_memory(run, module)) // (n_graphs * per_row)
    found = _least(run, min(run.pass_limit, max(n_rows, 1) * n_columns))
    log.info("fabric.tokens_per_pass=auto: %d", found)
    return found


def evaluation_rows(
    run: Run, module: nn.Module, backbone: PreTrainedModel, caches: Sequence[CacheSpec]
) -> int:
    """Return `evaluation.batch_size`, or the rows whose caches fit into the memory; at most `MAX_ROWS`.

    Of several ranks, the one with the least memory decides; all must call this.

    Args:
        module: everything that is in memory and that trains.
        backbone: the backbone that samples.
        caches: the caches to sample with, one at a time.
    """
    given = run.cfg.evaluation.batch_size
    if given != AUTO:
        return int(given)
    shape = (1, max(run.sizes.prompts))
    needed = max(
        sum(rollout_needs(backbone, cache, shape, run.cfg.rollout, group=1).values()) for cache in caches
    )
    found = _least(run, max(min(MAX_ROWS, int(FOR_CACHE * free_memory(run, module)) // needed), 1))
    log.info("evaluation.batch_size=auto: %d", found)
    return found


def _least(run: Run, number: int) -> int:
    """Return the smallest of the ranks' numbers."""
    return -run.ranks.all_reduce_max(-number)


def free_memory(run: Run, module: nn.Module) -> int:
    """Return the bytes of this process's share of the device, less weights, gradients and two moments.

    The weights of a teacher are subtracted, too.
    """
    device, n_ranks = run.fabric.device, run.fabric.world_size
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        n_nodes = getattr(run.fabric.strategy, "num_nodes", 1)  # a single process has no such number
        total = machine_memory() * n_nodes // n_ranks
    distillation = run.parts.distillation
    teacher = distillation.teacher if isinstance(distillation, ModelDistillation) else None
    for parameter in chain(module.parameters(), [] if teacher is None else teacher.parameters()):
        n_bytes = parameter.numel() * parameter.element_size()
        n_shares = n_ranks if isinstance(parameter, DTensor) else 1
        total -= n_bytes * (4 if parameter.requires_grad else 1) // n_shares
    return max(total, 0)


def check_rollout_memory(run: Run, backbone: PreTrainedModel) -> None:
    """Check that the memory there is suffices for the cache and the records of a rollout alone.

    A warning says so where the codes of a quantized cache save less than their record takes.

    Prompts count as the shortest, and a dense cache, which grows, as it is at first.

    Raises:
        MemoryExhaustedError: it does not.
    """
    cfg, group_size = run.cfg, run.cfg.algorithm.group_size
    cache = CacheSpec.dense() if run.parts.correction.samples_dense else run.parts.cache.for_rollouts
    most = FIRST_TOKENS if cache.is_dense else cfg.rollout.max_new_tokens
    settings = replace(cfg.rollout, max_new_tokens=min(most, cfg.rollout.max_new_tokens))
    n_prompts = cfg.rollout.n_prompts // (cfg.rollout.n_shards or run.fabric.world_size)
    asked = cache, (n_prompts, min(run.sizes.prompts)), settings, group_size
    with run.fabric.autocast():
        needs, warning = rollout_needs(backbone, *asked), explain_code_record(backbone, *asked)
    sizes = {what: needs[what] for what in (CACHE, *RECORDS) if what in needs}
    there = available_memory(run.fabric.device)
    if "rl" in cfg.stages and sum(sizes.values()) > there:
        parts = [f"{human_bytes(n)} for the {what} (change {SETTINGS[what]})" for what, n in sizes.items()]
        raise MemoryExhaustedError(
            f"a rollout of {group_size} responses to each of {n_prompts} prompts needs at least "
            f"{', '.join(parts)}, more than the {human_bytes(there)} of memory here"
        )
    if "rl" in cfg.stages and warning is not None:
        log.warning(warning)


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process may hope for: all of its device, or what the machine has left."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = [machine_memory(), psutil.virtual_memory().available + psutil.swap_memory().free]
    if psutil.LINUX:
        process = psutil.Process()
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        found += [] if limit == psutil.RLIM_INFINITY else [limit - process.memory_info().vms]
    return max(min(found), 0)


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container's limit."""
    limits = [Path(name).read_text().strip() for name in CGROUP_LIMITS if Path(name).is_file()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdecimal())])


def bytes_of_row(backbone: PreTrainedModel, n_columns: int, *, checkpoints_layers: Checkpoints) -> int:
    """Return the bytes that the forward of a row of `n_columns` keeps for its backward pass, by estimate.

    In 16 bits a layer keeps s·h·(34 + 5·a·s/h) bytes, with s columns, hidden size h and a heads, and s·h·34
    where attention weights are not kept (Korthikanti et al. 2022, arXiv:2205.05198): in kernels, and in long
    rows in plain torch; 19 of the 34 are its MLP's. With checkpoints only its input of 2·s·h stays, of two
    layers alone if it is kept in host memory, and one layer at a time is computed again, its MLP in tiles. A
    trained scorer of evictions also keeps the keys and values of all layers.
    """
    config, dtype = text_config(backbone), compute_dtype(backbone)
    n_layers, dim = int(config.num_hidden_layers), int(config.hidden_size)
    is_fused = uses_triton(torch.empty(0, dtype=dtype, device=backbone.device))
    of_attention = 0 if is_fused or n_columns >= LONG else 5 * int(config.num_attention_heads) * n_columns
    n_kept = min(n_layers, 2) if checkpoints_layers == "host" else n_layers
    n_in_mlp = min(n_columns, TILE) if checkpoints_layers and runs_in_tiles(backbone) else n_columns
    of_layer = n_columns * (15 * dim + of_attention) + n_in_mlp * 19 * dim
    n_bytes = 2 * n_kept * n_columns * dim + of_layer if checkpoints_layers else n_layers * of_layer
    scorer = kv_scorer_of(backbone)
    if checkpoints_layers and scorer is not None and any(p.requires_grad for p in scorer.parameters()):
        n_bytes += 4 * n_layers * n_columns * n_kv_heads(backbone) * max(head_dims(backbone))
    return n_bytes * dtype.itemsize // 2
