"""Decoder: fixed buffers for several sequences, and the decode step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.token_sampling import NoiseRows
from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.policy import Policy
from lit_rlkv.models.backbone import (
    can_be_captured,
    check_deterministic,
    has_states,
    head_logits,
    hidden_states,
    layer_kinds,
    rope_frequencies,
    text_config,
)
from lit_rlkv.models.compiled_layers import CompiledLayers
from lit_rlkv.models.key_balance import key_balance
from lit_rlkv.models.kv_scorer import kv_scorer_of
from lit_rlkv.models.output_projection import output_projections
from lit_rlkv.models.preparation import check_chunks
from lit_rlkv.rollout.expert_record import ExpertRecorder
from lit_rlkv.rollout.graph import CudaGraphRunner
from lit_rlkv.rollout.mask_record import MaskRecorder
from lit_rlkv.rollout.paused_rows import PausedRow, pause_rows, resume_rows
from lit_rlkv.rollout.recorders import CodeRecorder, EvictionRecorder, Recorder
from lit_rlkv.rollout.sampling import Kept, sample
from lit_rlkv.settings import Sampling
from lit_rlkv.types import TensorBatch


@dataclass(frozen=True)
class DecodeSettings:
    """Response length, tokens that end or pad a response, and how tokens are sampled."""

    max_new_tokens: int
    eos_token_ids: Int[Tensor, " eos"]
    pad_token_id: int
    sampling: Sampling


@dataclass(frozen=True)
class DecodedRows(TensorBatch):
    """Finished sequences, with all columns of the decoder's buffers."""

    input_ids: Int[Tensor, "row seq"]
    response_mask: Bool[Tensor, "row seq"]
    logps: Float[Tensor, "row seq"]
    parts: Mapping[str, Any]
    """Results of the recorders by part of the record: a tensor, or a list with an entry for each row."""

    def new_empty(self, n_rows: int) -> "DecodedRows":
        """Allocate uninitialised memory for `n_rows` rows of the same columns."""
        rows = self.map_tensors(lambda value: value.new_empty((n_rows, *value.shape[1:])))
        lists = {name: [None] * n_rows for name, part in self.parts.items() if isinstance(part, list)}
        return replace(rows, parts={**rows.parts, **lists})

    def write(self, places: Sequence[int], rows: "DecodedRows") -> None:
        """Copy `rows` to the given places, in place."""
        index = torch.tensor(places)
        old, new = ({**vars(each), **each.parts} for each in (self, rows))
        for name, value in old.items():
            if isinstance(value, Tensor):
                value[index.to(value.device)] = new[name]
            elif isinstance(value, list):
                for place, entry in zip(places, new[name], strict=True):
                    value[place] = entry


FIRST_TOKENS, GROWTH = 256, 1.5
"""Response tokens for which a dense cache has slots at first, and the factor by which its rows grow. A larger
factor leaves more slots unused; a smaller one copies more, and captures more CUDA graphs."""

NOT_CAPTURED: WeakSet[PreTrainedModel | type[Policy]] = WeakSet()
"""Models whose decode step, and policies whose eviction, could not be captured; later rollouts do not try."""


class Decoder:
    """Decodes `n_rows` sequences at a time; a finished sequence frees its row for another.

    The last column of the buffers is scratch space, to which finished rows write.

    A dense cache begins with slots for the prompt and `FIRST_TOKENS` tokens of the response, and grows as the
    responses do. An evicting cache never does.

    Args:
        model: model from `prepare_backbone`.
        n_prompt_columns: columns of the longest prompt; the buffers have `max_new_tokens` more.
        settings: settings; buffers are on the device of `settings.eos_token_ids`.
        generator: random numbers of sampling and of eviction policies, on the same device.
        cuda_graph: capture the step as a CUDA graph, which needs CUDA; None: if it can be captured.
        n_splits: see `generate`.
        compile_layers: compile the decoder layers for the step.
        record_routing: record the experts of each token.
        prefill_chunk: most given tokens of a row in one forward; None: all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheSpec,
        n_rows: int,
        n_prompt_columns: int,
        settings: DecodeSettings,
        generator: torch.Generator | None,
        *,
        cuda_graph: bool | None,
        n_splits: int | None = None,
        compile_layers: bool = False,
        record_routing: bool = False,
        prefill_chunk: int | None = None,
    ) -> None:
        check_deterministic(model)
        if prefill_chunk is not None:
            check_chunks(model)
        device = settings.eos_token_ids.device
        self.model = model
        self.settings = settings
        self.generator = generator
        self.prefill_chunk = prefill_chunk
        self.n_rows = n_rows
        self.seq_len = n_prompt_columns + settings.max_new_tokens
        n_layers = text_config(model).num_hidden_layers
        self.kv = SlotCache(
            cache,
            n_layers,
            n_rows,
            self.seq_len,
            device,
            generator,
            n_prompt=n_prompt_columns,
            n_splits=n_splits,
            n_slots=min(self.seq_len, n_prompt_columns + FIRST_TOKENS),
            kinds=layer_kinds(model),
            scorer=kv_scorer_of(model),
            frequencies=rope_frequencies(model),
            projections=output_projections(model),
            balance=key_balance(model) if cache.dtype == "int4" else (),
        )
        shape = (n_rows, self.seq_len + 1)
        self.input_ids = torch.full(shape, settings.pad_token_id, device=device)
        self.logps = torch.zeros(shape, device=device, dtype=torch.float32)
        self.response_mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.newest = torch.full((n_rows,), settings.pad_token_id, device=device)
        self.is_running = torch.zeros(n_rows, dtype=torch.bool, device=device)
        self.all_rows = torch.arange(n_rows, device=device)
        self._noise_rows: NoiseRows | None = None
        # A compiled layer would be compiled anew for every number of rows.
        self.keeps_rows = compile_layers
        self.recorders: list[Recorder] = [EvictionRecorder(self.kv)]
        if cache.dtype is not None:
            self.recorders.append(CodeRecorder(self.kv, cache.dtype))
        if record_routing:
            self.recorders.append(ExpertRecorder(model, *shape))
        if settings.sampling.is_restricted and settings.sampling.temperature > 0:
            self.recorders.append(MaskRecorder(n_rows, device))
        self._layers: AbstractContextManager[None] = (
            CompiledLayers(model) if compile_layers else nullcontext()
        )
        is_graph = cuda_graph
        if cuda_graph is None:
            is_graph = device.type == "cuda" and can_be_captured(model) and model not in NOT_CAPTURED
        self._is_graph = bool(is_graph)
        self._has_kernels = uses_triton(torch.empty(0, device=device, dtype=model.dtype))
        self._step = CudaGraphRunner(generator, is_enabled=self._is_graph, is_required=bool(cuda_graph))
        # The reference of eviction reads on the host which rows are due; a graph cannot.
        is_graph = self._is_graph and self._has_kernels
        if cuda_graph is None:
            is_graph = is_graph and type(self.kv.policy) not in NOT_CAPTURED
        self._evict = CudaGraphRunner(generator, is_enabled=is_graph, is_required=bool(cuda_graph))

    def prefill(
        self,
        rows: Sequence[int],
        input_ids: Int[Tensor, "batch prompt"],
        is_prompt: Bool[Tensor, "batch prompt"],
    ) -> None:
        """Prefill each prompt once, and sample the first token of each of its `len(rows) / batch` rows."""
        n_samples = len(rows) // len(input_ids)
        index = torch.tensor(rows, device=input_ids.device)
        self.kv.begin(rows, is_prompt)
        for recorder in self.recorders:
            recorder.begin(rows)
        self.input_ids[index] = self.settings.pad_token_id
        self.logps[index] = 0.0
        self.response_mask[index] = False
        logits = self._feed(rows, input_ids, is_prompt)
        self._sample_after(index, logits.repeat_interleave(n_samples, dim=0))

    def feed(
        self, rows: Sequence[int], tokens: Int[Tensor, "row new"], is_token: Bool[Tensor, "row new"]
    ) -> None:
        """Append given tokens to the responses of rows, as many as each has, and sample the token after them.

        The given tokens are read with the row's newest one, which no forward has read yet. They are part of
        the sequence, but not of the response: `response_mask` is False on them, and they have no log-probs.
        The rows may have ended, for example with the end of their turn: in the latest step, or with a `pause`
        directly after it and a `resume` before this.

        Args:
            tokens: left-padded tokens, at least one in each row.

        Raises:
            ValueError: a row has no columns left for its tokens and one more, or it ended before the latest
                step; or the model forgets its states (`check_chunks`).
        """
        check_chunks(self.model)
        index, n_new = torch.tensor(rows, device=tokens.device), is_token.sum(dim=1)
        if (end := int((self.kv.column[index] + n_new).max()) + 3) > self.seq_len:
            raise ValueError(
                f"a row must have columns for its given tokens and one to sample, but has {self.seq_len} and "
                f"needs {end}; give fewer tokens, or raise max_new_tokens"
            )
        newest = (tokens.shape[1] - n_new)[:, None]
        tokens = F.pad(tokens, (1, 0)).scatter(1, newest, self.newest[index, None])
        is_token = F.pad(is_token, (1, 0)).scatter(1, newest, True)
        while self.kv.policy is None and int((self.kv.n_live[:, index] + n_new).max()) >= self.kv.n_slots:
            self.grow(range(self.n_rows))
        lens = n_new.tolist()
        if not has_states(self.model):
            self._sample_after(index, self._feed(rows, tokens, is_token))
            return
        for length in dict.fromkeys(lens):  # padding must not enter a state that a row has already
            part = [i for i, n in enumerate(lens) if n == length]
            new = slice(-1 - length, None)
            logits = self._feed([rows[i] for i in part], tokens[part, new], is_token[part, new])
            self._sample_after(index[part], logits)

    def pause(self, rows: Sequence[int]) -> list[PausedRow]:
        """Put aside what further steps overwrite of rows that have ended in the latest one."""
        self.kv.levels.stop(rows)
        return pause_rows(self.kv, self.newest, rows)

    def end(self, row: int, token_ids: Sequence[int]) -> None:
        """Append given tokens that end a row, which no forward reads."""
        start = int(self.kv.column[row]) + 2
        ids = torch.tensor(token_ids, device=self.newest.device)
        self.input_ids[row, start : start + len(ids)] = ids
        self.kv.column[row] += len(ids)

    def resume(self, rows: Sequence[int], paused: Sequence[PausedRow]) -> None:
        """Put paused rows back, which may have other numbers now."""
        resume_rows(self.kv, self.newest, rows, paused)

    def _feed(
        self,
        rows: Sequence[int],
        tokens: Int[Tensor, "batch new"],
        is_token: Bool[Tensor, "batch new"],
    ) -> Float[Tensor, "batch vocab"]:
        """Append left-padded tokens to rows, in chunks that end together; return the logits after the last.

        A chunk is read once for the `len(rows) / batch` rows that take the same tokens: all chunks but the
        last go to the first of them, and the last copies what it holds.
        """
        n_samples, width, lens = len(rows) // len(tokens), tokens.shape[1], is_token.sum(dim=1)
        index = torch.tensor(rows, device=tokens.device)
        sources = index[::n_samples]
        place = torch.arange(width, device=tokens.device)
        columns = (self.kv.column[sources] + lens)[:, None] + place - (width - 1)
        positions = (columns - self.kv.first[sources, None]).clamp(min=0)
        written = columns.where(is_token, self.seq_len).repeat_interleave(n_samples, dim=0)
        self.input_ids[index[:, None], written] = tokens.repeat_interleave(n_samples, dim=0)
        for chunk in self._chunks(lens.tolist(), width):
            is_last, part = chunk.stop == width, is_token[:, chunk.stop - 1].nonzero()[:, 0]
            fed = rows if is_last else sources[part].tolist()
            is_given = is_token[part, chunk]
            with self.kv.feed(fed, is_given), self._watching():
                hidden = hidden_states(
                    self.model, tokens[part, chunk], positions[part, chunk], slot_cache=self.kv
                )
            for recorder in self.recorders:
                recorder.fed(index if is_last else sources[part], columns[part, chunk], is_given)
        return head_logits(self.model, hidden[:, -1])

    def _chunks(self, lens: Sequence[int], width: int) -> list[slice]:
        """Return the columns of each chunk, counted from the end, so that they depend on no other row."""
        if self.prefill_chunk is None:
            return [slice(0, width)]
        ends = range(width, width - max(lens), -self.prefill_chunk)
        return [slice(max(end - self.prefill_chunk, width - max(lens)), end) for end in reversed(ends)]

    def _sample_after(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]) -> None:
        """Sample the tokens that follow a feed."""
        self.is_running[rows] = True
        for recorder in self.recorders:
            recorder.begin_step()
        self._append(rows, logits)

    def step(self) -> None:
        """Sample one more token for every running row.

        Waits for the device only when a dense cache grows, or a record is full because `make_room` was not
        called in time.
        """
        if not self.kv.has_room(1):
            self.grow(range(self.n_rows))
        for recorder in self.recorders:
            recorder.begin_step()
        # A graph replays the same shapes, and a kernel stops at the last key of each row by itself.
        if not (self._step.is_enabled or self._has_kernels):
            self.kv.n_read = self.kv.n_filled
        self._step(self._decode)
        if self._is_graph and not self._step.is_enabled:
            NOT_CAPTURED.add(self.model)
        if self.kv.levels.step():
            self._evict.is_enabled &= self._step.is_enabled  # a second warning would say nothing new
            was_graph, policy = self._evict.is_enabled, self.kv.policy
            self._evict(self.kv.evict)
            if policy is not None and was_graph and not self._evict.is_enabled:
                NOT_CAPTURED.add(type(policy))
                self._step.forget()  # its graph does not know the state that the generator now has

    def make_room(self, n_steps: int) -> None:
        """Prepare the recorders for so many steps; may wait for the device."""
        for recorder in self.recorders:
            recorder.make_room(n_steps)

    def forget_graph(self) -> None:
        """Capture anew what reads weights, because these may have moved."""
        self._step.forget()
        if (policy := self.kv.policy) is not None and policy.reads_projection:
            self._evict.forget()

    @property
    def next_size(self) -> int:
        """Slots of a row after a dense cache has grown once more."""
        return min(self.seq_len, int(GROWTH * self.kv.n_slots) + 1)

    def grow(self, rows: Sequence[int]) -> None:
        """Give a dense cache more slots, and go on with these rows alone, numbered anew in this order.

        They sample what they would with the other rows beside them, as in a cache that need not grow.
        """
        index = torch.tensor(rows, device=self.newest.device)
        if len(rows) < self.n_rows:
            before = self._noise_rows or NoiseRows(self.all_rows, self.n_rows)
            self._noise_rows = NoiseRows(before.index[index], before.n)
        self.kv.resize(index, self.next_size)
        self.input_ids, self.logps = self.input_ids[index], self.logps[index]
        self.response_mask, self.newest = self.response_mask[index], self.newest[index]
        self.is_running = self.is_running[index]
        self.n_rows, self.all_rows = len(rows), torch.arange(len(rows), device=index.device)
        for recorder in self.recorders:
            recorder.keep(rows)
        self._step.forget()

    def read_rows(self, rows: Sequence[int]) -> DecodedRows:
        """Return a copy of finished rows, which may then be reused."""
        index = torch.tensor(rows, device=self.newest.device)
        return DecodedRows(
            input_ids=self.input_ids[index, :-1],
            response_mask=self.response_mask[index, :-1],
            logps=self.logps[index, :-1],
            parts={recorder.part: recorder.read(rows) for recorder in self.recorders},
        )

    def read_tokens(self, rows: Sequence[int]) -> tuple[Int[Tensor, "row seq"], Bool[Tensor, "row seq"]]:
        """Return a copy of `input_ids` and `response_mask` of rows on the CPU; waits for the device."""
        index = torch.tensor(rows, device=self.newest.device)
        return self.input_ids[index, :-1].cpu(), self.response_mask[index, :-1].cpu()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for recorder in self.recorders:
                stack.enter_context(recorder.watching())
            yield

    def _decode(self) -> None:
        self.kv.advance(self.is_running)
        positions = (self.kv.column - self.kv.first)[:, None]
        with self._layers, self._watching():
            hidden = hidden_states(self.model, self.newest[:, None], positions, slot_cache=self.kv)
        columns = self.kv.column.where(
            self.is_running, self.seq_len
        )  # a finished row reads no token of its own
        for recorder in self.recorders:
            recorder.stepped(columns)
        self._append(self.all_rows, head_logits(self.model, hidden[:, -1]))

    def _append(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]) -> None:
        """Sample a token for each row and write it into the next column."""
        settings, is_running = self.settings, self.is_running[rows]
        token, logp, kept = self._choose(rows, logits)
        for recorder in self.recorders:
            recorder.sampled(rows, kept, is_running)
        token = token.where(is_running, settings.pad_token_id)
        column = (self.kv.column[rows] + 1).where(is_running, self.seq_len)
        self.input_ids[rows, column] = token
        self.logps[rows, column] = logp
        self.response_mask[rows, column] = is_running
        self.newest[rows] = token
        is_eos = (token[:, None] == settings.eos_token_ids).any(dim=1)
        self.is_running[rows] = is_running & ~is_eos & (column < self.seq_len - 1)

    def _choose(self, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Kept | None]:
        """Return the next token of each row, its log-prob and what it was chosen from; see `sample`."""
        # A feed samples for some rows only.
        noise_rows = self._noise_rows if rows is self.all_rows else None
        return sample(logits, self.settings.sampling, self.generator, noise_rows)
