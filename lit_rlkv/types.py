"""Data shared by all packages, as frozen dataclasses; their tensors are never modified."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Int32, UInt8
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.log_row import LogRow

NEVER = torch.iinfo(torch.int32).max
"""Eviction time of a key that is never evicted."""
MOST_NARROW = 2**16 - 2
"""Most columns whose eviction times are kept in 16 bits."""
OWN_CHOICE = -1
"""In place of an expert that was recorded: the router chooses for itself."""

_BatchType = TypeVar("_BatchType", bound="TensorBatch")


@dataclass(frozen=True)
class TensorBatch:
    """A frozen dataclass whose tensors share their first dimension, the batch."""

    def map_parts(self: _BatchType, change: Any) -> _BatchType:
        """Return a copy with `change` applied to every tensor and nested batch, also in mappings."""

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: changed(part) for name, part in value.items()}
            return change(value) if isinstance(value, Tensor | TensorBatch) else value

        return replace(self, **{f.name: changed(getattr(self, f.name)) for f in fields(self)})

    def map_tensors(self: _BatchType, change: Any) -> _BatchType:
        """Return a copy with `change` applied to every tensor, also in mappings and nested batches."""
        return self.map_parts(
            lambda one: one.map_tensors(change) if isinstance(one, TensorBatch) else change(one)
        )

    def to(self: _BatchType, device: torch.device | str) -> _BatchType:
        """Return the batch on a device. Lightning moves batches by this method."""
        return self.map_parts(lambda one: one.to(device))

    def rows(self: _BatchType, index: Tensor | slice) -> _BatchType:
        """Return a batch with the chosen rows of every tensor, where it is; scalars stay the same."""
        return self.map_parts(
            lambda one: one.rows(index) if isinstance(one, TensorBatch) else one[_beside(one, index)]
        )

    def select(self: _BatchType, rows: Tensor | slice, columns: Int[Tensor, "row column"]) -> _BatchType:
        """Return the chosen rows with new columns: column i of row r is the old column `columns[r, i]`.

        The last dimension of every tensor must be the columns.
        """

        def selected(value: Tensor | TensorBatch) -> Tensor | TensorBatch:
            if isinstance(value, TensorBatch):
                return value.select(rows, columns)
            value = value[rows]
            index = columns.view(len(columns), *[1] * (value.ndim - 2), -1)
            return value.gather(-1, index.expand(*value.shape[:-1], -1))

        return self.map_parts(selected)

    def padded(self: _BatchType, n_columns: int, n_left: int = 0) -> _BatchType:
        """Return the batch with so many more columns of zeros at the end and at the front of every tensor."""

        def wide(value: Tensor | TensorBatch) -> Tensor | TensorBatch:
            if isinstance(value, TensorBatch):
                return value.padded(n_columns, n_left)
            return F.pad(value, (n_left, n_columns))

        return self.map_parts(wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, also those in mappings and nested batches."""
        found: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            found.append(value)
            return value

        self.map_tensors(keep)
        return found

    @classmethod
    def cat(cls: type[_BatchType], batches: Sequence[_BatchType]) -> _BatchType:
        """Return the rows of all batches, one batch after another; scalars are those of the first batch."""

        def joined(values: Sequence[Any]) -> Any:
            assert len({*map(type, values)}) == 1, "a part that only some batches have"
            if isinstance(values[0], TensorBatch):
                return values[0].cat(values)
            return torch.cat(list(values)) if isinstance(values[0], Tensor) else values[0]

        if len(batches) == 1:
            return batches[0]
        names = [f.name for f in fields(cls)]
        return replace(batches[0], **{name: joined([getattr(b, name) for b in batches]) for name in names})


def times_dtype(n_columns: int) -> torch.dtype:
    """Return the dtype in which eviction times of so many columns are kept; `to` this dtype narrows them.

    int16 holds the lower 16 bits, which are all of a time up to `MOST_NARROW`, and -1 for `NEVER`.
    """
    return torch.int16 if n_columns <= MOST_NARROW else torch.int32


def wide(times: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return eviction times as int32 if they are kept in 16 bits, else as they are."""
    if times.dtype != torch.int16:
        return times
    found = times.int() & 0xFFFF
    return found.masked_fill_(found == 0xFFFF, NEVER)


def _beside(values: Tensor, index: Tensor | slice) -> Tensor | slice:
    """Return an index on the device of these values."""
    return index.to(values.device) if isinstance(index, Tensor) else index


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `role` is system, user, assistant or tool."""

    role: str
    content: str
    name: str | None = field(default=None, compare=False)
    """The tool whose result it is."""

    def as_dict(self) -> dict[str, str]:
        """Return the fields that have a value."""
        return {name: value for name, value in vars(self).items() if value is not None}


Prompt = str | tuple[Message, ...]
"""A prompt: a text, or the messages of a chat."""


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as readable text; a chat becomes lines of `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


@dataclass(frozen=True)
class Problem:
    """A problem of a task: prompt, worked solution for SFT, and expected answer."""

    prompt: Prompt
    solution: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More fields for reward functions, as JSON values."""
    turns: tuple[str, ...] = ()
    """Worked turns before the solution: a response and its observation, and so on, for SFT."""


@dataclass(frozen=True)
class PromptBatch(TensorBatch):
    """Left-padded prompts; `attention_mask` is True on real tokens."""

    input_ids: Int[Tensor, "batch prompt"]
    attention_mask: Bool[Tensor, "batch prompt"]


@dataclass(frozen=True)
class SamplingMasks(TensorBatch):
    """The token ids that `top_k`, `top_p` and `min_p` left to the sampler, for each response token.

    `token_ids` has no batch dimension: the ids of the first response token of row 0 come first, then those of
    its second one, and so on through the rows. The order of ids within one token means nothing.
    """

    counts: Int32[Tensor, "batch seq"]
    """Number of ids for each response token, at least 1; 0 elsewhere."""
    token_ids: Int32[Tensor, " kept"]

    def rows(self, index: Tensor | slice) -> "SamplingMasks":
        index, n_ids = _beside(self.counts, index), self.counts.sum(dim=1)
        starts, lengths = (n_ids.cumsum(dim=0) - n_ids)[index], n_ids[index]
        ends = lengths.cumsum(dim=0)
        n_kept = int(ends[-1]) if len(ends) > 0 else 0
        moves = (starts - ends + lengths).repeat_interleave(lengths, output_size=n_kept)
        places = torch.arange(n_kept, device=moves.device) + moves
        return SamplingMasks(self.counts[index], self.token_ids[places])

    def select(self, rows: Tensor | slice, columns: Int[Tensor, "row column"]) -> "SamplingMasks":
        """Return rows with new columns, which must hold all response tokens, in their order."""
        chosen = self.rows(rows)
        return replace(chosen, counts=chosen.counts.gather(1, columns))

    def padded(self, n_columns: int, n_left: int = 0) -> "SamplingMasks":
        return replace(self, counts=F.pad(self.counts, (n_left, n_columns)))


@dataclass(frozen=True)
class Codes(TensorBatch):
    """The record of the codes of a quantized cache: `record_of` those of each key, then of its value."""

    dtype: str
    """`CacheSpec.dtype` of the sampler's cache."""
    group: int
    """Codes that share check bits."""
    record: UInt8[Tensor, "batch layer kv_head byte seq"]
    """Without bytes, a learner rounds as if no codes were recorded."""
    balance: tuple[Float[Tensor, "kv_head dim"], ...] = ()
    """Divisors of the keys of each layer with attention, one set for all rows; empty: none."""

    @classmethod
    def cat(cls, batches: Sequence["Codes"]) -> "Codes":
        """Return the rows of all batches, whose keys must have been divided by the same numbers."""
        first, *others = (batch.balance for batch in batches)
        if not all(len(other) == len(first) and all(map(_is_equal, first, other)) for other in others):
            raise ValueError(
                "rollouts whose int4 keys have another balance cannot be joined; sample them anew"
            )
        return super().cat(batches)

    def to(self, device: torch.device | str) -> "Codes":
        return replace(super().to(device), balance=tuple(one.to(device) for one in self.balance))


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """True for equal tensors. The host waits for others only, which views of one rollout do not have."""
    return one is other or torch.equal(one, other)


@dataclass(frozen=True)
class Record(TensorBatch):
    """All that the sampler saw and chose beside its tokens, as a learner replays it.

    The last dimension of every tensor is the columns of the tokens. A part that is None was not recorded.
    That of a rollout waits in host memory, because it may be larger than what the device has left. `select`
    moves the rows of a micro-batch to the device of its tokens.
    """

    evicted_at: Int[Tensor, "batch layer kv_head seq"]
    """First query column that no longer sees this key; NEVER if it was not evicted, 0 on padding.

    As `generate` keeps it, in 16 bits up to 65,534 columns, which only `wide` and `Rollout` can read. A
    `view` and what `select` returns are wide.
    """
    sampling_masks: SamplingMasks | None = None
    """The token ids that each response token was chosen from; None: the whole vocabulary."""
    codes: Codes | None = None
    """The codes of a quantized cache, whose rounding the replay repeats."""
    expert_ids: Int[Tensor, "batch router expert seq"] | None = None
    """Experts that the sampler's routers chose for each token, in the order in which the routers run;
    `OWN_CHOICE` on padding and on a row's last token, which no forward read."""

    @classmethod
    def dense(cls, attention_mask: Bool[Tensor, "batch seq"]) -> "Record":
        """Return the record of a dense cache: each key is seen up to the end of its row."""
        return cls(torch.where(attention_mask, _row_ends(attention_mask), 0).int()[:, None, None])

    def view(
        self, attention_mask: Bool[Tensor, "batch seq"], *, shadow: bool, routing: bool = True
    ) -> "Record":
        """Return what a learner's forward replays: the sampler's keys and codes, or all keys as they are.

        It is on the device of the mask. Keys of padding are never seen, and none after the end of its row.
        The tokens that the sampler chose from are not part of it, because the head reads them.

        Args:
            routing: False lets the routers choose for themselves.
        """
        record = self.to(attention_mask.device)
        experts = record.expert_ids if routing else None
        if not shadow:
            return replace(self.dense(attention_mask), expert_ids=experts)
        if self.evicted_at.shape[1] == 0:
            raise ValueError(
                "the rollout has lost its record of evictions (Rollout.without_records), and cannot be "
                "replayed without it; keep the rollout as generate returns it"
            )
        seen = torch.minimum(wide(record.evicted_at), _row_ends(attention_mask)[:, None, None].int())
        seen = seen.masked_fill(~attention_mask[:, None, None], 0)
        return Record(seen, codes=record.codes, expert_ids=experts)

    def until(self, column: int) -> "Record":
        """Return a view of the columns before this one."""
        return self.map_tensors(lambda value: value[..., :column])

    def of_prompts(self, n_prompt: Int[Tensor, " batch"]) -> Iterator[Int[Tensor, "batch *_ seq"]]:
        """Yield what the queries of prompts replay, in tables that are equal for equal prompts."""
        for table in self.tensors():
            # A query of the prompt is before column n_prompt, so evictions from there on are equal for it.
            last = n_prompt[:, None, None, None].to(table.dtype)
            yield (table.minimum(last) if table is self.evicted_at else table)[..., : int(n_prompt.max())]

    def select(self, rows: Tensor | slice, columns: Int[Tensor, "row column"]) -> "Record":
        """Return rows with new columns, which must be consecutive, on the device of `columns`.

        Eviction times move along, and become `wide`. Nothing but these rows is moved.
        """
        chosen = self.rows(rows).to(columns.device)
        chosen = replace(chosen, evicted_at=wide(chosen.evicted_at))
        chosen = super(Record, chosen).select(slice(None), columns)
        starts = columns[:, :1, None, None].to(chosen.evicted_at.dtype)
        moved = (chosen.evicted_at - starts).clamp(min=0)
        return replace(chosen, evicted_at=torch.where(chosen.evicted_at == NEVER, chosen.evicted_at, moved))

    def padded(self, n_columns: int, n_left: int = 0) -> "Record":
        """Return the record with columns of padding around it; eviction times move along."""
        found, experts = super().padded(n_columns, n_left), self.expert_ids
        if experts is not None:
            experts = F.pad(experts, (n_left, n_columns), value=OWN_CHOICE)
        times = found.evicted_at
        if times.shape[-1] > MOST_NARROW:
            times = wide(times)
        if n_left > 0:
            never = -1 if times.dtype == torch.int16 else NEVER
            times = times + n_left * ((times != 0) & (times != never)).to(times.dtype)
        return replace(found, evicted_at=times, expert_ids=experts)

    @classmethod
    def cat(cls, batches: Sequence["Record"]) -> "Record":
        """Return the rows of all records, one after another; `wide` if one of them is."""
        if len({each.evicted_at.dtype for each in batches}) > 1:
            batches = [replace(each, evicted_at=wide(each.evicted_at)) for each in batches]
        return super().cat(batches)

    def delayed(self, by: int) -> "Record":
        """Return the record with every eviction so many columns later, or earlier if below 0."""
        times = wide(self.evicted_at)
        own = torch.arange(times.shape[-1], device=times.device)
        is_evicted = (times > own) & (times != NEVER)
        return replace(self, evicted_at=torch.where(is_evicted, (times + by).maximum(own + 1), times))

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part.nbytes for name, part in parts.items() if part is not None}


def _row_ends(attention_mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch 1"]:
    """Return the column after the last token of each row; queries from there on need no key."""
    column = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (column * attention_mask).amax(dim=1, keepdim=True) + 1


@dataclass(frozen=True)
class Rollout(TensorBatch):
    """Sampled sequences, and the record of what the sampler saw: its keys, and the tokens it chose from.

    As sampled, columns are shared by all rows: a prompt is left-padded up to the column where every response
    starts. The rows of a micro-batch are cut to their own tokens instead, and start at column 0.

    `generate` leaves the record in host memory, and `packed` moves that of chosen rows to their tokens; `to`
    moves all of it.
    """

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    """True on prompt and response tokens, False on padding."""
    response_mask: Bool[Tensor, "batch seq"]
    """True on sampled tokens, up to and including the end-of-sequence token."""
    rollout_logps: Float[Tensor, "batch seq"]
    """Log-prob of each sampled token under the distribution it was sampled from; 0 elsewhere."""
    record: Record
    kv_bytes: int
    """Bytes of keys and values that the cache allocated for the whole batch."""
    temperature: float = 1.0
    """Temperature of the softmax that the responses were sampled from; 0: greedy."""

    def __post_init__(self) -> None:
        if not isinstance(self.record, Record) or not isinstance(self.record.evicted_at, Tensor):
            raise TypeError(
                f"record must be a Record(evicted_at, ...) of a tensor, got {self.record!r:.80}; use "
                "Record.dense(attention_mask) where nothing was evicted"
            )
        for name in ("attention_mask", "response_mask"):
            mask = getattr(self, name)
            if mask.dtype != torch.bool:  # 0 and 1, as in transformers
                if not torch.equal(mask, mask.bool().to(mask.dtype)):
                    raise ValueError(f"{name} must be True or 1 on tokens and False or 0 elsewhere")
                object.__setattr__(self, name, mask.bool())

    @classmethod
    def from_log(cls, rows: Sequence[LogRow], *, temperature: float = 1.0) -> "Rollout":
        """Return the rollout of what another engine has logged, which sampled at this temperature.

        Raises:
            ValueError: there is no row, or rows have evictions of different layers or KV heads.
        """
        shapes = {tuple(row.evicted_at.shape[:2]) for row in rows if row.evicted_at is not None} or {(1, 1)}
        if len(rows) == 0 or len(shapes) > 1:
            raise ValueError(
                "rows must be at least one, with evictions of equal layers and KV heads, got "
                f"{len(rows)} rows of {sorted(shapes)}"
            )
        longest_prompt = max(len(row.prompt_ids) for row in rows)
        longest_response = max(len(row.response_ids) for row in rows)
        shape, padded = shapes.pop(), []
        for row in rows:
            ids, n_prompt = torch.cat([row.prompt_ids, row.response_ids])[None], len(row.prompt_ids)
            times = torch.tensor(NEVER) if row.evicted_at is None else row.evicted_at
            record = Record(times.expand(1, *shape, ids.shape[1]).to(times_dtype(ids.shape[1])))
            is_sampled, logps = (F.pad(part, (n_prompt, 0))[None] for part in (row.is_sampled, row.logps))
            one = cls(ids, torch.ones_like(ids).bool(), is_sampled, logps, record, 0, temperature)
            padded.append(one.padded(longest_response - len(row.response_ids), longest_prompt - n_prompt))
        return cls.cat(padded)

    @property
    def evicted_at(self) -> Int[Tensor, "batch layer kv_head seq"]:
        """First query column that no longer sees each key; NEVER if it was not evicted, 0 on padding.

        The whole table on the device of the tokens, which may have no room for it; see `evictions`.
        """
        return wide(self.record.evicted_at.to(self.input_ids.device))

    def evictions(self, layer: int) -> Int[Tensor, "batch kv_head seq"]:
        """Return `evicted_at` of one layer; a table of one layer is that of all."""
        table = self.record.evicted_at
        return wide(table[:, layer if table.shape[1] > 1 else 0].to(self.input_ids.device))

    def with_record(self, **parts: Any) -> "Rollout":
        """Return the rollout with other parts of its record, as `dataclasses.replace` of a `Record`."""
        return replace(self, record=replace(self.record, **parts))

    def without_records(self) -> "Rollout":
        """Return the rollout without what only a replay reads, the largest of its tensors."""
        return replace(self, record=Record(self.record.evicted_at[:, :0, :0]))


torch.serialization.add_safe_globals([Rollout, Record, SamplingMasks, Codes])  # torch.load opens a saved one


@dataclass(frozen=True)
class Rewards(TensorBatch):
    """Rewards of a batch of completions, and their components."""

    total: Float[Tensor, " batch"]
    """Reward to learn from: weighted, normalised, clipped, minus penalties."""
    components: dict[str, Float[Tensor, " batch"]]
    """Scores by component; NaN where a score failed."""
    is_failed: Bool[Tensor, " batch"] | None = None
    """True for responses whose reward failed; their total is the mean of their group. None: none failed."""
    weighted: Float[Tensor, " batch"] | None = None
    """Weighted sum of the components, before normalisation; None if it equals `total`."""
    weights: dict[str, float | int] | None = None
    """Weights of the components of `weighted`, without zeros; None if `total` is the only part."""

    @property
    def scores(self) -> Float[Tensor, " batch"]:
        """Rewards in the units of the components, comparable between iterations and runs."""
        return self.total if self.weighted is None else self.weighted


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with a better and a worse completion."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True)
class TrainBatch(TensorBatch):
    """Input of one training step: a rollout, its advantages, and all denominators of the loss.

    `loss_weight` includes the counts of the whole optimizer step. So a loss is a weighted sum that does not
    depend on the split into micro-batches or ranks.
    """

    rollout: Rollout
    advantages: Float[Tensor, "batch seq"]
    old_logps: Float[Tensor, "batch seq"]
    """Log-probs under the learner's own view before its first update on this rollout."""
    ref_logps: Float[Tensor, "batch seq"]
    """Log-probs of the reference under the learner's view; zeros if not needed."""
    correction: Float[Tensor, "batch seq"]
    """Importance weight of each response token, detached."""
    loss_weight: Float[Tensor, "batch seq"]
    """Weight of each response token in the policy loss of its optimizer step; 0 if it does not count."""
    kl_coef: float | int
    """Coefficient of the KL loss in this iteration."""
    n_response_tokens: int
    """Response tokens of the whole optimizer step; denominator of per-token metrics and the value loss."""
    is_first_update: bool
    """True before the first update on this rollout, when replay must match sampling."""
    ends_step: bool
    """True for the last micro-batch of an optimizer step."""
    learners: tuple[str, ...] = ("policy",)
    """Roles that learn from this micro-batch; one role at a time needs less memory."""
    old_values: Float[Tensor, "batch seq"] | None = None
    """The critic's values before its first update on this rollout; None without a critic."""
    returns: Float[Tensor, "batch seq"] | None = None
    """Targets of the critic; None without a critic."""
    is_chosen: Bool[Tensor, "batch seq"] | None = None
    """Tokens that the advantage estimator has chosen; None without a choice."""
    n_pairs: int = 0
    """Preference pairs of the whole optimizer step; rows 2i and 2i + 1 are then chosen and rejected."""
    n_decisions: int = 0
    """Evictions of the whole optimizer step, counted by KV head and compaction; 0 if none is learned from."""
    n_steps: int = 1
    """Optimizer steps of the iteration."""
    n_steps_done: float | int = 1
    """Optimizer steps of the iteration done after this micro-batch; a part of a step is a fraction."""
