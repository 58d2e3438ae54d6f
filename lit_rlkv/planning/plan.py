"""The plan: for each cache how many rows a card decodes at a time, its peaks of memory, and its seconds."""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.config import Config, build
from lit_rlkv.kernels.quantization import group_of, quantized_bytes, record_bytes
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.backbone import head_dims, layer_kinds, n_kv_heads, optional_setting, text_config
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.planning.cards import Card
from lit_rlkv.planning.models import module_of
from lit_rlkv.planning.needs import GROWTH, PREFILL, STEP, rollout_needs
from lit_rlkv.planning.seconds import Work, mean_keys, rollout_seconds, update_seconds
from lit_rlkv.types import times_dtype

NF4_BYTES = 0.56
"""Bytes of a weight in NF4 with its scales."""
AUTOCAST_BYTES = 2
"""Bytes of autocast's copy of a trained weight in 16 bits."""
SIXTEEN_BITS = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtype that a precision computes in, if it is not that of the weights."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of different families for the number of experts."""
TIME_BYTES = 4
"""Bytes of the time of an eviction in a pass of the learner."""
MAX_TOKENS = 2**22
"""Longest sequence that is looked for."""
Bytes = dict[str, int]


@dataclass(frozen=True)
class Row:
    """The rows, peaks and seconds of a run with one cache."""

    cache: CacheSpec
    n_rows: int
    """Responses that it decodes at a time; 0: not even one group fits."""
    rollout: Bytes
    """Bytes at the peak, by what they are for; of one group if none fits."""
    update: Bytes
    tokens_per_pass: int
    """Tokens of the learner's largest pass; 0: not even one sequence fits."""
    rollout_s: float | None
    """Seconds; None: unknown for this device, or it does not fit."""
    update_s: float | None

    @property
    def fits(self) -> bool:
        """True if a run with this cache is possible."""
        return self.n_rows > 0 and self.tokens_per_pass > 0


@dataclass(frozen=True)
class Change:
    """A setting that would let a run fit, or more of it at a time."""

    setting: str
    effect: str


@dataclass(frozen=True)
class Planner:
    """Plans one run on one card.

    Args:
        roles: its models, on the meta device.
        pass_bytes: of the backbone that learns.
        n_prompt: tokens of a prompt.
        n_ranks: devices of the run, each such a card.
    """

    cfg: Config
    roles: Roles
    pass_bytes: PassBytes
    card: Card
    n_prompt: int
    n_ranks: int = 1

    @property
    def policy(self) -> PreTrainedModel:
        """The backbone that samples and learns."""
        return self.roles.backbone("policy")

    @property
    def n_columns(self) -> int:
        """Tokens of the longest sequence."""
        return self.n_prompt + self.cfg.rollout.max_new_tokens

    @property
    def n_responses(self) -> int:
        """Responses of a rank and iteration."""
        return -(-self.cfg.rollout.n_prompts // self.n_ranks) * self.cfg.algorithm.group_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and of an unquantized cache."""
        return SIXTEEN_BITS.get(self.cfg.fabric.precision, self.policy.dtype)

    @cached_property
    def model_bytes(self) -> Bytes:
        """Bytes of weights, gradients and optimizer of a rank."""
        found = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
        for weight in self.roles.parameters():
            found["weights"] += weight.numel() * self._size(weight)
            if weight.requires_grad:
                found["gradients"] += weight.numel() * weight.itemsize
                found["optimizer"] += 2 * weight.numel() * weight.itemsize
                if self.dtype != weight.dtype and self.trains_all:
                    found["weights"] += weight.numel() * AUTOCAST_BYTES
        return {what: int(n / (self.n_ranks if self.is_sharded else 1)) for what, n in found.items()}

    def _size(self, weight: nn.Parameter) -> float:
        """Return the bytes of each number of a weight."""
        return NF4_BYTES if id(weight) in self._packed else weight.itemsize

    @cached_property
    def _packed(self) -> set[int]:
        """The weights of linear layers that are quantized; an output head is not."""
        if self.cfg.fabric.quantization is None:
            return set()
        heads = {
            id(self.roles.named_backbone(name).get_output_embeddings().weight)
            for name in self.roles.backbones
        }
        linear = {id(one.weight) for one in self.roles.backbones.modules() if isinstance(one, nn.Linear)}
        adapters = {id(weight) for weight in self.roles.parameters() if weight.requires_grad}
        return linear - heads - adapters

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds a part of the weights."""
        return self.cfg.fabric.strategy == "fsdp2"

    @property
    def trains_all(self) -> bool:
        """True if whole backbones learn, not adapters."""
        return LAYOUTS[self.cfg.roles.layout].trains_backbones

    def rows(self) -> list[Row]:
        """Return the plan with all keys, and with twice, all and half of the budget."""
        return [self.row(cache) for cache in self.caches()]

    @cached_property
    def cache(self) -> CacheSpec:
        """The cache of the rollouts."""
        samples_dense = build(self.cfg.correction).samples_dense
        return CacheSpec.dense() if samples_dense else CacheSpec.of(self.cfg.cache).for_rollouts

    def caches(self) -> Iterator[CacheSpec]:
        """Yield the caches to compare: all keys, and the configured one with more and fewer."""
        own = self.cache
        if own.is_dense:
            yield own
            return
        yield CacheSpec.dense()
        least = own.sink + own.window + 1
        n_layers = sum(kind.in_profile for kind in layer_kinds(self.policy))
        for budget in sorted({2 * own.budget, own.budget, max(own.budget // 2, least)}, reverse=True):
            cache = replace(own, budget=budget)
            try:
                cache.layer_budgets(n_layers)
            except ValueError:  # a profile leaves a layer too few keys
                if budget == own.budget:
                    raise
            else:
                yield cache

    def row(self, cache: CacheSpec) -> Row:
        """Return the plan with one cache, of as many rows and tokens as fit."""
        group, room = self.cfg.algorithm.group_size, self.card.usable
        most = min(self.cfg.rollout.max_rows or self.n_responses, self.n_responses)
        sizes = range(group, max(most, group) + 1, group)
        n_fitting = bisect(sizes, room, key=lambda n: sum(self.rollout_bytes(cache, n).values()))
        n_rows = sizes[n_fitting - 1] if n_fitting else 0
        passes = range(1, self.most_sequences + 1)
        n_sequences = bisect(passes, room, key=lambda n: sum(self.update_bytes(n).values()))
        tokens = n_sequences * self.n_columns
        seconds = self._seconds(cache, n_rows) if n_rows and tokens else (None, None)
        return Row(
            cache,
            n_rows,
            self.rollout_bytes(cache, n_rows or group),
            self.update_bytes(n_sequences or 1),
            tokens,
            *seconds,
        )

    def rollout_bytes(self, cache: CacheSpec, n_rows: int) -> Bytes:
        """Return the bytes at the peak of a rollout of so many rows at a time."""
        group = self.cfg.algorithm.group_size
        needs = rollout_needs(
            self.policy,
            cache,
            (-(-n_rows // group), self.n_prompt),
            self.cfg.rollout,
            group,
            self.dtype,
            is_gpu=self.card.is_gpu,
            n_responses=self.n_responses,
        )
        models = {what: n for what, n in self.model_bytes.items() if what != "gradients"}
        # Prompts are read before the first step, and before the cache grows.
        of_steps = [what for what in (STEP, GROWTH) if what in needs]
        is_larger = sum(needs[what] for what in of_steps) > needs[PREFILL]
        for what in [PREFILL] if is_larger else of_steps:
            del needs[what]
        if self.pass_bytes.state_bytes:
            needs["states of layers"] = n_rows * self.pass_bytes.state_bytes
        return models | self._gathered(is_whole=self.cfg.fabric.unshard_rollout) | needs

    def _gathered(self, *, is_whole: bool) -> Bytes:
        """Return the bytes of sharded weights that are gathered at a time: all, or two layers' share."""
        if not self.is_sharded:
            return {}
        n_bytes = sum(weight.numel() for weight in self.policy.parameters()) * self.dtype.itemsize
        n_layers = int(text_config(self.policy).num_hidden_layers)
        return {"gathered weights": n_bytes if is_whole else 2 * n_bytes // n_layers}

    def update_bytes(self, n_rows: int) -> Bytes:
        """Return the bytes at the peak of a pass of the learner; with `host` those of the device."""
        needs = self._pass(n_rows, self.n_columns, self.checkpoints)
        record = {"record of a pass": n_rows * self.n_columns * self._recorded_bytes(TIME_BYTES)}
        return self.model_bytes | self._gathered(is_whole=False) | needs | record

    def _recorded_bytes(self, time_bytes: int) -> int:
        """Return the bytes of a token in the record: when its keys are evicted, and their codes."""
        dtype, dim = self.cache.dtype, max(head_dims(self.policy))
        n_bytes = 0 if dtype is None else 2 * record_bytes(dim, dtype, group_of(dtype, self.dtype))
        n_layers = sum(kind.attends for kind in layer_kinds(self.policy))
        return n_layers * n_kv_heads(self.policy) * (n_bytes + time_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the records of all responses of a rank, which wait in host memory."""
        time_bytes = times_dtype(self.n_columns).itemsize
        return self.n_responses * self.n_columns * self._recorded_bytes(time_bytes)

    def _pass(self, n_rows: int, n_columns: int, checkpoints: Checkpoints) -> Bytes:
        """Return the bytes of a pass, whose forwards all wait for their backward."""
        needs = self.pass_bytes.of_pass(n_rows, n_columns, checkpoints)
        return needs | {"kept": needs["kept"] * (1 + self.n_more_graphs)}

    @cached_property
    def n_more_graphs(self) -> int:
        """Forwards with gradients that critic and distillation add to a pass."""
        more = 0 if self.cfg.distillation is None else build(self.cfg.distillation).n_graphs
        return int(self._module.n_graphs) - 1 + more

    @cached_property
    def _module(self) -> Any:
        return module_of(self.cfg, self.roles)

    @property
    def most_sequences(self) -> int:
        """Sequences of the largest pass that `fabric.tokens_per_pass` allows."""
        given = self.cfg.fabric.tokens_per_pass
        return max((TOKENS_PER_PASS if given == "auto" else given) // self.n_columns, 1)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The activations kept for the backward pass; of `auto` the fastest choice that fits."""
        given = self.cfg.roles.gradient_checkpointing
        if given != "auto":
            return given
        room = self.card.usable - sum(self.model_bytes.values())
        sizes = {False: self.most_sequences, True: 1}
        for checkpoints, n_rows in sizes.items():
            if sum(self._pass(n_rows, self.n_columns, checkpoints).values()) <= room:
                return checkpoints
        return self._least

    @property
    def _least(self) -> Checkpoints:
        """The choice of `auto` that keeps least."""
        return "host" if self.card.is_gpu else True

    def longest(self) -> int:
        """Return the tokens of the longest sequence that the learner takes, to 128; 0: none."""
        is_chosen = self.cfg.roles.gradient_checkpointing != "auto"
        keeps = self.checkpoints if is_chosen else self._least
        room, lengths = self.card.usable - sum(self.model_bytes.values()), range(0, MAX_TOKENS, 128)
        n_fitting = bisect(lengths, room, key=lambda n: sum(self._pass(1, n or 1, keeps).values()))
        return lengths[max(n_fitting - 1, 0)]

    def changes(self, row: Row) -> list[Change]:
        """Return settings with which more rows or longer sequences fit, or any at all."""
        found, own_longest = [], self.longest()
        for setting, cfg in self._other_configs():
            planner = replace(self, cfg=cfg)
            other, longest = planner.row(planner.cache), planner.longest()
            if other.n_rows > row.n_rows or longest > own_longest:
                helps = "it fits: " if row.fits < other.fits else "" if other.fits else "not enough alone: "
                effect = f"{other.n_rows} rows at a time, {longest:,} tokens learn"
                found.append(Change(setting, helps + effect))
        return found

    def _other_configs(self) -> Iterator[tuple[str, Config]]:
        """Yield settings and the config with each."""
        cfg, is_gpu = self.cfg, self.card.is_gpu
        if cfg.roles.gradient_checkpointing != "auto":
            roles = replace(cfg.roles, gradient_checkpointing="auto")
            yield "roles.gradient_checkpointing=auto", replace(cfg, roles=roles)
        is_packable = not (self.trains_all or self.is_sharded) and cfg.model.path is not None
        if is_gpu and cfg.fabric.quantization is None and is_packable:
            yield "fabric.quantization=4bit", replace(cfg, fabric=replace(cfg.fabric, quantization="4bit"))
        for dtype in ("int8", "int4") if cfg.cache.dtype is None else ():
            yield f"cache.dtype={dtype}", replace(cfg, cache=replace(cfg.cache, dtype=dtype))

    def settings(self, row: Row) -> list[str]:
        """Return the settings, beside those of the config, that make it run as planned."""
        is_whole = row.n_rows >= self.n_responses
        return [] if is_whole or not row.n_rows else [f"rollout.max_rows={row.n_rows}"]

    def _seconds(self, cache: CacheSpec, n_rows: int) -> tuple[float | None, float | None]:
        if self.card.bandwidth is None:
            return None, None
        group, n_tokens, n = self.cfg.algorithm.group_size, self.cfg.rollout.max_new_tokens, self.n_responses
        work, prompts = self._work(cache, n_rows), self.n_prompt * -(-n // group)
        is_compiled = self.cfg.rollout.compile_layers
        rollout = rollout_seconds(work, self.card, n_rows, n, prompts, n_tokens, is_compiled=is_compiled)
        n_epochs = self.cfg.algorithm.n_epochs
        return rollout, update_seconds(work, self.card, n, n * n_tokens + prompts, n_epochs)

    def _work(self, cache: CacheSpec, n_rows: int) -> Work:
        config = text_config(self.policy)
        n_heads, dim = int(config.num_attention_heads), max(head_dims(self.policy))
        of_key = 2 * n_kv_heads(self.policy) * quantized_bytes(dim, cache.dtype, self.dtype)
        level = (
            None
            if cache.is_dense
            else cache.budget + cache.interval / 2 + self.n_prompt * cache.protect_prompt
        )
        keys, n_pairs, n_tokens = 0.0, 0.0, self.cfg.rollout.max_new_tokens
        for kind in (kind for kind in layer_kinds(self.policy) if kind.attends):
            levels = [one for one in (level, kind.window) if one is not None and one < self.n_columns]
            mean = mean_keys(self.n_prompt, n_tokens, min(levels, default=None))
            keys += mean
            n_pairs += mean * n_tokens + self.n_prompt**2 / 2 / self.cfg.algorithm.group_size
        weights, active = self._weights(n_rows)
        return Work(
            weight_bytes=weights,
            n_products=active,
            n_layers=int(config.num_hidden_layers),
            key_bytes=keys * of_key,
            attention_flops=4 * dim * n_heads * n_pairs,
            is_dense=cache.is_dense,
            trains_all=self.trains_all,
            recomputes=bool(self.checkpoints),
            n_scorings=len(self.roles.needed),
            n_learners=len(self._module.learner_parts) + self.n_more_graphs,
        )

    def _weights(self, n_rows: int) -> tuple[int, int]:
        """Return the bytes of matrices that a step of so many rows reads, and the weights of a token."""
        tables = {id(one.weight) for one in self.policy.modules() if isinstance(one, nn.Embedding)}
        head = self.policy.get_output_embeddings().weight
        config = text_config(self.policy)
        chosen = optional_setting(config, "num_experts_per_tok")
        n_experts = next((n for name in EXPERTS if (n := optional_setting(config, name))), None)
        share = 1.0 if chosen is None or n_experts is None else chosen / n_experts
        n_bytes, n_active = 0.0, 0.0
        for name, weight in self.policy.named_parameters():
            if weight.ndim < 2 or "lora_" in name or (id(weight) in tables and weight is not head):
                continue
            is_expert = ".experts." in name
            size = self._size(weight)
            n_bytes += weight.numel() * size * (1 - (1 - share) ** n_rows if is_expert else 1)
            n_active += weight.numel() * (share if is_expert else 1)
        return int(n_bytes), int(n_active)
