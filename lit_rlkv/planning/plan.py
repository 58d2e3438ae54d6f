"""The plan: for each cache how many rows a card decodes at a time, its peaks of memory, and its seconds."""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from lit_rlkv.config import Config, build
from lit_rlkv.kernels.quantization import quantized_bytes
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.backbone import head_dims, layer_kinds, n_kv_heads, optional_setting, text_config
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.planning.needs import GROWTH, PREFILL, STEP, rollout_needs
from lit_rlkv.planning.passes import Bytes, Passes
from lit_rlkv.planning.seconds import Work, mean_keys, rollout_seconds, update_seconds
from lit_rlkv.types import times_dtype

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of different families for the number of experts."""


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
    """A setting with which more rows or longer sequences fit, or any at all."""

    override: str
    n_rows: int
    longest: int
    """Tokens of the longest sequence that learns."""
    fits: bool
    mends: bool
    """True if the config does not fit without it."""

    def __str__(self) -> str:
        helps = "it fits: " if self.mends else "" if self.fits else "not enough alone: "
        return f"{self.override}: {helps}{self.n_rows} rows at a time, {self.longest:,} tokens learn"


class Planner(Passes):
    """Plans one run on one card: rollouts, passes and seconds."""

    @property
    def n_responses(self) -> int:
        """Responses of a rank and iteration."""
        return -(-self.cfg.rollout.n_prompts // self.n_ranks) * self.cfg.algorithm.group_size

    @cached_property
    def n_greedy(self) -> int:
        """Greedy responses beside them, of which nothing is learned."""
        is_needed = build(self.cfg.algorithm.advantage).needs_greedy
        return self.n_responses // self.cfg.algorithm.group_size if is_needed else 0

    @property
    def trains_all(self) -> bool:
        """True if whole backbones learn, not adapters."""
        return LAYOUTS[self.cfg.roles.layout].trains_backbones

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
        group, sizes = self.cfg.algorithm.group_size, self.sizes
        n_fitting = bisect(sizes, self.card.usable, key=lambda n: sum(self.rollout_bytes(cache, n).values()))
        n_rows = sizes[n_fitting - 1] if n_fitting else 0
        n_tokens = self.n_tokens(self.checkpoints) if self.fits(1, self.checkpoints, margin=0) else 0
        seconds = self._seconds(cache, n_rows) if n_rows and n_tokens else (None, None)
        n_learned = -(-self.n_responses // self.cfg.algorithm.n_minibatches)
        update = self.update_bytes(max(min(n_tokens // self.n_columns, n_learned), 1))
        return Row(cache, n_rows, self.rollout_bytes(cache, n_rows or group), update, n_tokens, *seconds)

    @property
    def sizes(self) -> range:
        """Numbers of responses that may be decoded at a time, in whole groups."""
        group, n_shards = self.cfg.algorithm.group_size, self.cfg.rollout.n_shards or self.n_ranks
        n_own = -(-self.cfg.rollout.n_prompts // n_shards) * group
        return range(group, max(min(self.cfg.rollout.max_rows or n_own, n_own), group) + 1, group)

    def rollout_bytes(self, cache: CacheSpec, n_rows: int) -> Bytes:
        """Return the bytes at the peak of a rollout of so many rows at a time."""
        group = self.cfg.algorithm.group_size
        asked = self.policy, cache, (-(-n_rows // group), self.n_prompt), self.cfg.rollout, group, self.dtype
        needs = rollout_needs(*asked, is_gpu=self.card.is_gpu, n_responses=self.n_responses)
        models = {what: n for what, n in self.model_bytes.items() if what != "gradients"}
        # Prompts are read before the first step, and before the cache grows.
        of_steps = [what for what in (STEP, GROWTH) if what in needs]
        is_larger = sum(needs[what] for what in of_steps) > needs[PREFILL]
        for what in [PREFILL] if is_larger else of_steps:
            del needs[what]
        if self.pass_bytes is not None and self.pass_bytes.state_bytes:
            needs["states of layers"] = n_rows * self.pass_bytes.state_bytes
        if self.cfg.fabric.precision.endswith("mixed") and not self.is_sharded:  # autocast keeps them
            n_trained = sum(weight.numel() for weight in self.policy.parameters() if weight.requires_grad)
            needs["trained weights in 16 bits"] = n_trained * self.dtype.itemsize
        return models | self.gathered(is_whole=self.cfg.fabric.unshard_rollout) | needs

    def update_bytes(self, n_rows: int) -> Bytes:
        """Return the bytes at the peak of a pass of the learner; with `host` those of the device."""
        return (
            self.model_bytes
            | self.gathered(is_whole=False)
            | self.needs(n_rows, self.n_columns, self.checkpoints)
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of the records of all responses of a rank, which wait in host memory."""
        time_bytes = times_dtype(self.n_columns).itemsize
        return (self.n_responses + self.n_greedy) * self.n_columns * self.recorded_bytes(time_bytes)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The activations kept for the backward pass; of `auto` the fastest choice that fits."""
        return self.ways[self.choose()]

    def changes(self, row: Row) -> list[Change]:
        """Return the changes that help a config with this row."""
        found, own_longest = [], self.longest()
        for setting, cfg in self._other_configs():
            planner = replace(self, cfg=cfg)
            other, longest = planner.row(planner.cache), planner.longest()
            if other.n_rows > row.n_rows or longest > own_longest:
                found.append(Change(setting, other.n_rows, longest, other.fits, row.fits < other.fits))
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
        return [f"rollout.max_rows={row.n_rows}"] if 0 < row.n_rows < self.sizes[-1] else []

    def most_keys(self, row: Row) -> dict[int, int]:
        """Return the largest budgets that fit with half, as many and twice the rows, by the rows."""
        own, sizes = self.cache, self.sizes
        if own.is_dense or own.budget_profile is not None:
            return {}
        budgets = range(own.sink + own.window + 1, self.n_columns)
        place = sizes.index(row.n_rows) + 1 if row.n_rows else 2
        counts = [sizes[n - 1] for n in (place // 2, place, 2 * place) if 1 <= n <= len(sizes)]

        def needed(n_keys: int, n_rows: int) -> int:
            return sum(self.rollout_bytes(replace(own, budget=n_keys), n_rows).values())

        fitting = {n: bisect(budgets, self.card.usable, key=lambda b: needed(b, n)) for n in counts}
        return {n_rows: budgets[n - 1] for n_rows, n in fitting.items() if n}

    def _seconds(self, cache: CacheSpec, n_rows: int) -> tuple[float | None, float | None]:
        if self.card.bandwidth is None:
            return None, None
        group, n_tokens, n = self.cfg.algorithm.group_size, self.cfg.rollout.max_new_tokens, self.n_responses
        work, prompts = self._work(cache, n_rows), self.n_prompt * -(-n // group)
        is_compiled = self.cfg.rollout.compile_layers
        n_read = prompts + self.n_prompt * self.n_greedy
        n_rolled = n + self.n_greedy
        rollout = rollout_seconds(
            work, self.card, n_rows, n_rolled, n_read, n_tokens, is_compiled=is_compiled
        )
        n_epochs = self.cfg.algorithm.n_epochs
        return rollout, update_seconds(work, self.card, n, n * n_tokens + prompts, n_epochs)

    def _work(self, cache: CacheSpec, n_rows: int) -> Work:
        assert isinstance(self.roles, Roles)
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
            n_learners=self.n_graphs + ("value" in self.roles.needed and self.separate_passes),
        )

    def _weights(self, n_rows: int) -> tuple[int, int]:
        """Return the bytes of matrices that a step of so many rows reads, and the weights of a token."""
        unread = {id(one.weight) for one in self.policy.modules() if isinstance(one, nn.Embedding)}
        unread = (unread | self._idle) - {id(self.policy.get_output_embeddings().weight)}
        config = text_config(self.policy)
        chosen = optional_setting(config, "num_experts_per_tok")
        n_experts = next((n for name in EXPERTS if (n := optional_setting(config, name))), None)
        share = 1.0 if chosen is None or n_experts is None else chosen / n_experts
        n_bytes, n_active = 0.0, 0.0
        for name, weight in self.policy.named_parameters():
            if weight.ndim < 2 or "lora_" in name or id(weight) in unread:
                continue
            is_expert = ".experts." in name
            size = self.size(weight)
            n_bytes += weight.numel() * size * (1 - (1 - share) ** n_rows if is_expert else 1)
            n_active += weight.numel() * (share if is_expert else 1)
        return int(n_bytes), int(n_active)
