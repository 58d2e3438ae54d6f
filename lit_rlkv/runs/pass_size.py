"""Sizes chosen from memory: tokens in a pass of the learner, and rows in an evaluation."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.config import AUTO
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints, checkpointed_layers
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.planning.advice import SETTINGS, explain_code_record
from lit_rlkv.planning.cards import machine_memory
from lit_rlkv.planning.needs import CACHE, RECORDS, rollout_needs
from lit_rlkv.rollout.decoder import FIRST_TOKENS
from lit_rlkv.runs.run import Run
from lit_rlkv.units import human_bytes

log = logging.getLogger(__name__)
FOR_PASSES, FOR_CACHE = 0.8, 0.3
"""Shares of the memory beside weights and optimizer for a pass of the learner, whose bytes are counted within
15 %, and for the cache of an evaluation. The rest is for records, temporary tensors and fragmentation."""
MAX_ROWS = 512
"""Most rows that an evaluation samples at a time."""


class PassNeeds:
    """Bytes of passes of a backbone, counted once, when they are first asked for: by all ranks together.

    Args:
        backbone: the backbone that learns.
        n_graphs: forwards of a pass that wait for their backward at the same time.
    """

    def __init__(self, run: Run, backbone: PreTrainedModel, n_graphs: int = 1) -> None:
        self.backbone = backbone
        self._run, self._n_graphs = run, n_graphs

    @cached_property
    def _count(self) -> PassBytes:
        with self._run.fabric.autocast():
            return PassBytes(self.backbone)

    def of_pass(self, n_rows: int, n_columns: int, checkpoints: Checkpoints) -> int:
        """Return the bytes of a pass of rows of so many tokens."""
        parts = self._count.of_pass(n_rows, n_columns, checkpoints)
        return (self._n_graphs - 1) * parts["kept"] + sum(parts.values())


def choose_checkpoints(run: Run, module: nn.Module, needs: PassNeeds) -> Checkpoints:
    """Return `roles.gradient_checkpointing`, or the fastest choice whose bytes fit into the memory.

    All activations, if a pass of `fabric.tokens_per_pass` fits with them and none has run out of memory in
    this run; else the inputs of layers; on CUDA these in host memory, if otherwise not even the longest row
    would fit. Of several ranks, the one with the least memory decides; all must call this.

    Args:
        module: everything that is in memory and that trains.
        needs: bytes of passes of the backbone that learns.
    """
    given = run.cfg.roles.gradient_checkpointing
    if given != "auto":
        return given
    if not checkpointed_layers(needs.backbone):
        return False
    n_columns, room = _longest(run), _room(run, module)
    n_tokens = run.cfg.fabric.tokens_per_pass
    n_rows = max((TOKENS_PER_PASS if n_tokens == AUTO else int(n_tokens)) // n_columns, 1)
    ways: list[Checkpoints] = [False, True, "host"]
    ways = ways if needs.backbone.device.type == "cuda" else ways[:2]
    sizes = [needs.of_pass(1 if way else n_rows, n_columns, way) for way in ways]
    has_failed = run.pass_limit < TOKENS_PER_PASS
    fitting = (n for n, size in enumerate(sizes) if size <= room and (n > 0 or not has_failed))
    chosen = ways[run.ranks.all_reduce_max(next(fitting, len(ways) - 1))]
    log.info(
        "roles.gradient_checkpointing=auto: %s; with all activations %d rows of %d tokens would take %s, "
        "with the inputs of layers alone a row %s, and there are %s%s",
        str(chosen).lower(),
        n_rows,
        n_columns,
        *(human_bytes(n_bytes) for n_bytes in (*sizes[:2], room)),
        "; a pass ran out of memory before" if has_failed else "",
    )
    return chosen


def tokens_per_pass(run: Run, module: nn.Module, needs: PassNeeds, checkpoints: Checkpoints) -> int:
    """Return `fabric.tokens_per_pass`, or what should fit into the memory of the device.

    After a pass that did not fit, `Run.pass_limit` bounds it. Of several ranks, the one with the least
    memory decides; all must call this.

    Args:
        module: everything that is in memory and that trains.
        needs: bytes of passes of the backbone that learns.
        checkpoints: what it keeps for the backward pass.
    """
    given = run.cfg.fabric.tokens_per_pass
    if given != AUTO:
        return int(given)
    n_columns, room = _longest(run), _room(run, module)
    n_rows = -(-run.pass_limit // n_columns)
    while n_rows > 1 and (needed := needs.of_pass(n_rows, n_columns, checkpoints)) > room:
        n_rows = max(min(n_rows * room // needed, n_rows - 1), 1)
    found = _least(run, min(run.pass_limit, n_rows * n_columns))
    log.info("fabric.tokens_per_pass=auto: %d", found)
    return found


def _longest(run: Run) -> int:
    """Return the columns of the longest row."""
    return max(run.sizes.prompts) + max(run.cfg.rollout.max_new_tokens, *run.sizes.solutions)


def _room(run: Run, module: nn.Module) -> int:
    return int(FOR_PASSES * free_memory(run, module))


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
    shape = n_prompts, min(run.sizes.prompts)
    with run.fabric.autocast():
        needs = rollout_needs(backbone, cache, shape, settings, group_size)
        warning = explain_code_record(backbone, cache, shape, cfg.rollout, group_size)
    sizes = {what: needs[what] for what in (CACHE, *RECORDS) if what in needs}
    there = available_memory(run.fabric.device)
    if "rl" in cfg.stages and sum(sizes.values()) > there:
        parts = [f"{human_bytes(n)} for the {what} (change {SETTINGS[what]})" for what, n in sizes.items()]
        raise MemoryExhaustedError(
            f"a rollout of {group_size} responses to each of {n_prompts} prompts needs at least "
            f"{', '.join(parts)}, more than the {human_bytes(there)} of memory here"
        )
    if "rl" in cfg.stages and warning is not None and run.is_rank_zero:
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
