"""Sequences under way: fixed buffers for a number of rows, and the step that adds a token to each."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.models.backbone import head_logits, hidden_states, text_config, token_positions
from lit_rlkv.rollout.graph import Captured
from lit_rlkv.rollout.sampling import sample
from lit_rlkv.types import TensorBatch


@dataclass(frozen=True)
class Stopping:
    """When a sequence ends, and how it is sampled until then."""

    max_new_tokens: int
    eos_ids: Int[Tensor, " eos"]
    pad_id: int
    temperature: float | int


@dataclass(frozen=True)
class Rows(TensorBatch):
    """What a decoder holds of some rows, in all columns."""

    input_ids: Int[Tensor, "row seq"]
    response_mask: Bool[Tensor, "row seq"]
    logps: Float[Tensor, "row seq"]
    evicted_at: Int[Tensor, "row layer kv_head seq"]

    def blank(self, n_rows: int) -> "Rows":
        """Room for so many rows, to be written."""
        values = (getattr(self, field.name) for field in fields(Rows))
        return Rows(*(value.new_empty((n_rows, *value.shape[1:])) for value in values))

    def put(self, places: Sequence[int], rows: "Rows") -> None:
        """Write rows in their places."""
        index = torch.tensor(places, device=self.input_ids.device)
        for field in fields(Rows):
            getattr(self, field.name)[index] = getattr(rows, field.name)


class Decoder:
    """`n_rows` places for sequences; a prompt takes as many as it has samples, and leaves them when they end.

    The last column of the buffers is scrap: rows that have ended write there.

    Args:
        model: from `prepare_backbone`.
        n_prompt_columns: of the longest prompt; the buffers have `max_new_tokens` more.
        generator: of the samples, and of policies that draw; on the device of `stopping.eos_ids`, which is
            that of the buffers, too.
        cuda_graph: capture the step, which needs CUDA.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheSpec,
        n_rows: int,
        n_prompt_columns: int,
        stopping: Stopping,
        generator: torch.Generator | None,
        *,
        cuda_graph: bool,
    ) -> None:
        device = stopping.eos_ids.device
        self.model = model
        self.stopping = stopping
        self.generator = generator
        self.n_rows = n_rows
        self.seq_len = n_prompt_columns + stopping.max_new_tokens
        self.kv = SlotCache(
            cache, text_config(model).num_hidden_layers, n_rows, self.seq_len, device, generator
        )
        shape = (n_rows, self.seq_len + 1)
        self.input_ids = torch.full(shape, stopping.pad_id, device=device)
        self.logps = torch.zeros(shape, device=device, dtype=torch.float32)
        self.response_mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.newest = torch.full((n_rows,), stopping.pad_id, device=device)
        self.is_running = torch.zeros(n_rows, dtype=torch.bool, device=device)
        self.all_rows = torch.arange(n_rows, device=device)
        self._step = Captured(generator, captures=cuda_graph)
        # Without the kernels, eviction asks which rows are full, and a graph cannot wait for the answer.
        evicts_on_device = cuda_graph and uses_triton(torch.empty(0, device=device, dtype=model.dtype))
        self._evict = Captured(generator, captures=evicts_on_device)

    def admit(
        self,
        rows: Sequence[int],
        input_ids: Int[Tensor, "batch prompt"],
        is_prompt: Bool[Tensor, "batch prompt"],
    ) -> None:
        """Prefill prompts once each, and sample the first token of every row that starts from them."""
        n_samples, n_columns = len(rows) // len(input_ids), input_ids.shape[1]
        with self.kv.prefill(rows, is_prompt):
            hidden = hidden_states(self.model, input_ids, token_positions(is_prompt), slot_cache=self.kv)
        logits = head_logits(self.model, hidden[:, -1])
        index = torch.tensor(rows, device=input_ids.device)
        self.input_ids[index] = self.stopping.pad_id
        self.input_ids[index, :n_columns] = input_ids.repeat_interleave(n_samples, dim=0)
        self.logps[index] = 0.0
        self.response_mask[index] = False
        self.is_running[index] = True
        self._append(index, logits.repeat_interleave(n_samples, dim=0))

    def step(self) -> None:
        """One more token for every row that is running. Never waits for the device."""
        self._step(self._decode)
        if self.kv.levels.step():
            self._evict(self.kv.evict)

    def take(self, rows: Sequence[int]) -> Rows:
        """The records of rows that have ended, which others may then use."""
        index = torch.tensor(rows, device=self.newest.device)
        return Rows(
            input_ids=self.input_ids[index, :-1],
            response_mask=self.response_mask[index, :-1],
            logps=self.logps[index, :-1],
            evicted_at=self.kv.evicted_at(index),
        )

    def _decode(self) -> None:
        self.kv.advance(self.is_running)
        positions = (self.kv.column - self.kv.first)[:, None]
        hidden = hidden_states(self.model, self.newest[:, None], positions, slot_cache=self.kv)
        self._append(self.all_rows, head_logits(self.model, hidden[:, -1]))

    def _append(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]) -> None:
        """Sample a token for each row and write it behind the newest."""
        stopping, is_running = self.stopping, self.is_running[rows]
        token, logp = sample(logits, stopping.temperature, self.generator)
        token = token.where(is_running, stopping.pad_id)
        column = (self.kv.column[rows] + 1).where(is_running, self.seq_len)
        self.input_ids[rows, column] = token
        self.logps[rows, column] = logp
        self.response_mask[rows, column] = is_running
        self.newest[rows] = token
        is_eos = (token[:, None] == stopping.eos_ids).any(dim=1)
        self.is_running[rows] = is_running & ~is_eos & (column < self.seq_len - 1)
