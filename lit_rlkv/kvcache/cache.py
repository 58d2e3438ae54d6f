"""SlotCache: a pool of slots per layer, compacted in place, with a record of all evictions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from lit_rlkv.kvcache.feed import Feed, span_of
from lit_rlkv.kvcache.fill_levels import NO_BUDGET, FillLevels
from lit_rlkv.kvcache.layer import SlotLayer
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.kvcache.spec import CacheSpec
from lit_rlkv.kvcache.state_layer import HybridLayer, HybridWindowLayer, StateLayer
from lit_rlkv.kvcache.value_norms import Projection
from lit_rlkv.kvcache.window_layer import WindowLayer
from lit_rlkv.types import NEVER, times_dtype


class SlotCache(Cache):
    """KV cache of a fixed number of rows, for a transformers model from `prepare_backbone`.

    A forward within `feed` appends given tokens to rows, which `begin` has emptied for a prompt.
    After `advance`, a forward of one token per row adds its keys. `evict` compacts the rows that `is_due`
    names to the budget. All state that changes from step to step is in tensors allocated once, so that a step
    can be captured as a CUDA graph.

    Args:
        n_rows: sequences held at a time.
        seq_len: columns of a sequence, prompt and response.
        generator: for policies that draw; on `device`.
        n_splits: see `lit_rlkv.kernels.decode_attention`.
        n_prompt: columns of the longest prompt, which all prompts end at; for caches that protect them.
        n_slots: slots of a row of a dense cache until it grows; None: `seq_len`, so that it never does.
        kinds: kind of each layer; None: all attend to all keys.
        scorer: what a trained policy has made for the model.
        frequencies: see `SlotView.frequencies`.
        projections: W_o of each layer with attention, for policies that read it; empty: the model has none.
        balance: what the keys of each layer with attention are divided by before they become codes, powers of
            two as `lit_rlkv.models.key_balance` finds them; empty: nothing.

    Raises:
        ValueError: a policy needs a scorer, frequencies or projections and gets none.
    """

    def __init__(
        self,
        spec: CacheSpec,
        n_layers: int,
        n_rows: int,
        seq_len: int,
        device: torch.device,
        generator: torch.Generator | None = None,
        *,
        n_prompt: int = 0,
        n_splits: int | None = None,
        n_slots: int | None = None,
        kinds: Sequence[LayerKind] | None = None,
        scorer: nn.Module | None = None,
        frequencies: Tensor | None = None,
        projections: Sequence[Projection] = (),
        balance: Sequence[Float[Tensor, "kv_head dim"]] = (),
    ) -> None:
        self.spec = spec
        self.n_splits = n_splits
        self.policy = spec.make_policy()
        self.frequencies = frequencies
        if self.policy is not None and self.policy.reads_rope and frequencies is None:
            raise ValueError(
                f"cache.policy={spec.policy_name} needs RoPE on the halves of heads, alike in all layers; "
                "this model has another or none, so use another policy"
            )
        self.generator = generator
        self.n_rows = n_rows
        self.seq_len = seq_len
        self.prompt_end = n_prompt if spec.protect_prompt and not spec.is_dense else 0
        """Columns before it hold prompts that are never evicted."""
        self.kinds = kinds or [LayerKind()] * n_layers
        has_profile = spec.budget_profile is not None
        n_own = sum(kind.in_profile for kind in self.kinds) if has_profile else 0
        self.group_budgets = (seq_len if spec.is_dense else spec.budget, *spec.layer_budgets(n_own))
        """Budget of group 0, all layers without a budget profile, and of each layer that is in one."""
        self.slots = [spec.n_slots(seq_len, n_prompt, budget) for budget in self.group_budgets]
        """Slots of a row in the layers of each group."""
        if spec.is_dense and n_slots is not None:
            self.slots = [n_slots]
        self.most_bytes = 0
        """Most bytes of the pools so far, but for what is allocated while they grow."""
        # A row that was never filled reads one slot of zeros.
        self.n_live = torch.ones((len(self.slots), n_rows), dtype=torch.long, device=device)
        """Keys of each row in the layers of each group."""
        self._budgets = torch.tensor(self.group_budgets, device=device)[:, None]
        self.column = torch.zeros(n_rows, dtype=torch.long, device=device)
        self.fed_up_to = torch.zeros(n_rows, dtype=torch.long, device=device)
        """Column of the last token of each row that was given, not sampled."""
        self.written = self.column
        """Column of the record of codes that a decode step writes, `seq_len` for rows that have ended."""
        self.first = torch.zeros(n_rows, dtype=torch.long, device=device)
        n_unprotected = [slots - self.prompt_end for slots in self.slots]
        self.levels = FillLevels(spec, n_rows, n_unprotected, self.group_budgets)
        self._evicts = (self.levels.budgets[:, 0] < NO_BUDGET).tolist()
        self.n_read: list[int] | None = None
        """Leading slots that attention reads in each group; None: all."""
        self.feeds: list[Feed] = []
        """The given tokens of a forward, as each group takes them; empty in a decode step."""
        layers: list[Any] = [self._layer(kind) for kind in self.kinds]
        self.slot_layers = [layer for layer in layers if isinstance(layer, SlotLayer)]
        """The layers with attention."""
        for number, layer in enumerate(self.slot_layers):
            layer.number = number
        self.balance = tuple(balance)
        for layer, of_layer in zip(self.slot_layers, self.balance, strict=len(balance) > 0):
            layer.balance = of_layer
        if has_profile:
            in_profile = (layer for layer in self.slot_layers if layer.kind.in_profile)
            for number, layer in enumerate(in_profile, start=1):
                layer.group = number
        if self.policy is not None and self.policy.is_trained:
            if scorer is None:
                raise ValueError(
                    f"cache.policy={spec.policy_name} needs the scorer that RL trains, and this model has "
                    "none; give it one by lit_rlkv.models.kv_scorer.load_kv_scorer, or use another policy"
                )
            for layer in self.slot_layers:
                layer.scorer = cast("Callable[[int], Callable[..., Tensor]]", scorer.layer)(layer.number)
        if self.policy is not None and self.policy.reads_projection:
            if not projections:
                raise ValueError(
                    f"cache.policy={spec.policy_name} weighs values by the output projection o_proj, and a "
                    "layer of this model has none by that name, or FSDP shards it; leave "
                    "cache.policy_options.value_norms out"
                )
            for layer, projection in zip(self.slot_layers, projections, strict=True):
                layer.projection = projection
        self.state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        super().__init__(layers=layers)

    def _layer(self, kind: LayerKind) -> SlotLayer | StateLayer | CacheLayerMixin:
        if not kind.attends:  # a layer without a state asks no cache
            return StateLayer(self, kind) if kind.n_states > 0 else DynamicLayer()
        if kind.window is not None and kind.window < self.seq_len:
            return (HybridWindowLayer if kind.n_states > 0 else WindowLayer)(self, kind)
        return (HybridLayer if kind.n_states > 0 else SlotLayer)(self, kind)

    @property
    def n_slots(self) -> int:
        """Slots of a row, the most of all layers."""
        return max(self.slots)

    def begin(self, rows: Sequence[int], is_prompt: Bool[Tensor, "batch prompt"]) -> None:
        """Empty these rows, `len(rows) / batch` for each left-padded prompt that will be fed to them."""
        n_padding = is_prompt.shape[1] - is_prompt.sum(dim=1)
        first = n_padding.repeat_interleave(len(rows) // len(is_prompt))
        index = torch.tensor(rows, device=first.device)
        self.n_live[:, index] = 0
        self.first[index], self.column[index] = first, first - 1
        for layer in self.slot_layers:
            layer.begin(index)

    def table_without_evictions(self, rows: Int[Tensor, " row"] | slice) -> Int[Tensor, "row 1 seq"]:
        """Return the eviction table of a head that keeps all keys: 0 before the first token of each row.

        It is narrow; see `lit_rlkv.types.times_dtype`.
        """
        column = torch.arange(self.seq_len, device=self.first.device)
        return torch.where(column < self.first[rows, None, None], 0, NEVER).to(times_dtype(self.seq_len))

    @contextmanager
    def feed(self, rows: Sequence[int], is_token: Bool[Tensor, "batch new"]) -> Iterator[None]:
        """Within this block a forward reads left-padded tokens, and appends them to the rows.

        Each row that then has more keys than the budget is compacted to it, and counts its interval from
        there: so a prompt in one piece is a feed of an empty row. The tokens are read once for
        `len(rows) / batch` neighbours in `rows`, of which the first holds what all of them do.
        """
        n_samples = len(rows) // len(is_token)
        index = torch.tensor(rows, device=is_token.device)
        sources = index[::n_samples]
        n_new, n_held, first = is_token.sum(dim=1), self.n_live[:, sources], self.first[sources]
        newest = self.column[sources] + n_new
        n_kept = torch.minimum(n_held + n_new, self.budgets[:, sources])
        is_due = n_held + n_new > n_kept
        of_rows = torch.stack([n_new, newest + 1 - first, self.n_protected[sources]])
        new, n_tokens, n_protected, *held = torch.cat([of_rows, n_held]).tolist()
        self._check_feed(held[0], new, n_tokens)
        feeds = self.feeds = [
            Feed(
                rows=index,
                span=span_of(rows),
                is_token=is_token,
                n_new=n_new,
                n_held=n_held[group],
                n_kept=n_kept[group],
                most_held=max(of_group),
                is_padded=min(of_group) < max(of_group) or min(new) < is_token.shape[1],
                first=first,
                newest=newest,
                is_due=is_due[group],
                due=self._due(self.group_budgets[group], of_group, new, n_protected),
            )
            for group, of_group in enumerate(held)
        ]
        for layer in self.state_layers:
            layer.begin_feed(feeds[0])
        try:
            yield
            if any(layer.filled_by is not feeds[layer.group] for layer in self.slot_layers):
                raise ValueError("a layer does not attend to the tokens, but perhaps to images or an encoder")
            for layer in self.state_layers:
                layer.end_feed(feeds[0])
        finally:
            self.feeds = []
        self.n_live[:, index] = n_kept.repeat_interleave(n_samples, dim=1)
        self.column[index] = self.fed_up_to[index] = newest.repeat_interleave(n_samples)
        of_all = ([n for n in each for _ in range(n_samples)] for each in (n_tokens, n_protected))
        self.levels.start(rows, *of_all)

    def _due(self, budget: int, *n_keys: Sequence[int]) -> Int[Tensor, " due"] | None:
        """Return the indices of rows that have more keys than the budget and what is protected, if any.

        From numbers of the host, because a mask on a device would be waited for in each group.
        """
        rows = zip(*n_keys, strict=True)
        due = [row for row, (held, new, protected) in enumerate(rows) if held + new > budget + protected]
        return torch.tensor(due, device=self.first.device) if due else None

    def _check_feed(self, held: Sequence[int], new: Sequence[int], n_tokens: Sequence[int]) -> None:
        """Check that rows still have their keys, and slots for those of the given tokens.

        Raises:
            ValueError: a row ended more than one step ago, or a dense cache is too small.
        """
        if any(h == 1 < total - n for h, n, total in zip(held, new, n_tokens, strict=True)):
            raise ValueError(
                "a row has lost its keys, because it ended before the latest step; feed rows in the step in "
                "which they end"
            )
        if self.spec.is_dense and max(map(sum, zip(held, new, strict=True))) > self.n_slots:
            raise ValueError(f"a row would have more than {self.n_slots} keys; resize the cache before")

    def advance(self, is_running: Bool[Tensor, " row"] | None = None) -> None:
        """Make room for the next token of each row.

        A finished row keeps one slot, which it overwrites, so that attention reads nothing of its old keys.
        """
        step = 1 if is_running is None else is_running
        self.n_live += step
        self.column += step
        if is_running is not None:
            self.n_live.masked_fill_(~is_running, 1)
        if self.spec.dtype is not None:
            self.written = self.column if is_running is None else self.column.where(is_running, self.seq_len)

    @property
    def incoming(self) -> Feed | None:
        """The given tokens of a forward; None in a decode step."""
        return self.feeds[0] if self.feeds else None

    @property
    def n_filled(self) -> list[int]:
        """Leading slots that hold all keys of every running row after the next `advance`, for each group."""
        return [min(n + 1, slots) for n, slots in zip(self.levels.highest, self.slots, strict=True)]

    @property
    def n_protected(self) -> Int[Tensor, " row"]:
        """Keys of each row's prompt that are never evicted."""
        return (self.prompt_end - self.first).clamp(min=0)

    @property
    def budgets(self) -> Int[Tensor, "group row"]:
        """Keys that a compaction leaves in each row."""
        return self.n_protected + self._budgets

    @property
    def is_due(self) -> Bool[Tensor, "group row"]:
        """True for rows above the budget that have decoded a multiple of `interval` tokens since a feed."""
        n_decoded = self.column - self.fed_up_to
        return (n_decoded % self.spec.interval == 0) & (self.n_live > self.budgets)

    def has_room(self, n_steps: int) -> bool:
        """Return False if a dense cache must `resize` before so many calls of `advance`."""
        is_fixed = self.n_slots >= self.spec.n_slots(self.seq_len)
        return is_fixed or max(self.levels.highest) + n_steps <= self.n_slots

    def resize(self, rows: Int[Tensor, " kept"], n_slots: int) -> None:
        """Keep these rows of a dense cache alone, in pools of `n_slots` a row, which hold all their keys."""
        self.most_bytes = self.kv_bytes
        self.n_rows, self.slots = len(rows), [n_slots]
        self.n_live, self.column = self.n_live[:, rows], self.column[rows]
        self.fed_up_to, self.first = self.fed_up_to[rows], self.first[rows]
        self.levels.keep(rows.tolist())
        layers: list[SlotLayer | StateLayer] = [*self.slot_layers, *self.state_layers]
        for layer in dict.fromkeys(layers):  # a hybrid one is in both lists
            layer.resize(rows)

    def evict(self) -> None:
        """Compact every due row to the budget of each layer."""
        is_due = self.is_due
        with torch.autocast(is_due.device.type, enabled=False):  # scores are float32
            for layer in self.slot_layers:
                if self._evicts[layer.group]:
                    layer.compact(is_due[layer.group])
        self.n_live.copy_(torch.where(is_due, self.budgets, self.n_live))

    def evicted_at(self, rows: Int[Tensor, " row"]) -> Int[Tensor, "row layer kv_head seq"]:
        """Return, for each key of these rows, the first column whose query no longer sees it.

        Every KV head of a layer that has fewer than others is repeated; `layer_table` undoes that.
        """
        n_heads = max(layer.n_kv_heads for layer in self.slot_layers)
        shape = (len(rows), len(self.slot_layers), n_heads, self.seq_len)
        stacked = torch.empty(shape, dtype=torch.int32, device=rows.device)
        # Layer by layer, because a second copy of all can be too large.
        for number, layer in enumerate(self.slot_layers):
            stacked[:, number] = layer.table(rows).repeat_interleave(n_heads // layer.n_kv_heads, dim=1)
        return stacked

    def forget_codes(self, rows: Sequence[int]) -> None:
        """Forget the codes of these rows, which start another sequence."""
        for layer in self.slot_layers:
            if layer.codes is not None:
                layer.codes.begin(rows)

    def codes(self, rows: Sequence[int]) -> UInt8[Tensor, "row layer kv_head byte seq"]:
        """Return the codes of a quantized cache, of these rows, KV heads as in `evicted_at`."""
        records = [layer.codes for layer in self.slot_layers if layer.codes is not None]
        n_heads, n_bytes = (max(sizes) for sizes in zip(*(record.shape for record in records), strict=True))
        shape = (len(rows), len(records), n_heads, n_bytes, self.seq_len)
        stacked = torch.zeros(shape, dtype=torch.uint8, device=self.column.device)
        # Layer by layer, because a second copy of all can be too large.
        for number, record in enumerate(records):
            found = record.read(rows)
            found = found.repeat_interleave(n_heads // found.shape[1], dim=1)
            stacked[:, number, :, : found.shape[2]] = found
        return stacked

    @property
    def code_group(self) -> int:
        """Codes that share check bits in `codes`; after the first feed."""
        return max(layer.codes.group for layer in self.slot_layers if layer.codes is not None)

    @property
    def kv_bytes(self) -> int:
        """Most bytes of pools and states at a time: those of the first feed, unless a dense cache grew."""
        found = sum(layer.kv_bytes for layer in self.slot_layers)
        return max(self.most_bytes, found + sum(layer.state_bytes for layer in self.state_layers))
