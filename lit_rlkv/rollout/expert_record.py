"""ExpertRecorder: the experts that routers chose during a rollout, by row and column."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.models.routing import by_row, expert_dtype, recorded_experts, routers_of
from lit_rlkv.rollout.recorders import HOST, Recorder
from lit_rlkv.types import OWN_CHOICE


class ExpertRecorder(Recorder):
    """The experts of each token of a decoder's rows, in a buffer that a CUDA graph can write to.

    Args:
        n_columns: columns of the decoder's buffers, scratch space included.

    Raises:
        ValueError: the routing of the model cannot be recorded.
    """

    part = "expert_ids"

    def __init__(self, model: PreTrainedModel, n_rows: int, n_columns: int) -> None:
        self._routers = routers_of(model)
        shape = (n_rows, len(self._routers), max(router.k for router in self._routers), n_columns)
        self.ids = torch.full(shape, OWN_CHOICE, dtype=expert_dtype(self._routers), device=model.device)
        self._latest: Int[Tensor, "router token expert"] = self.ids[0, :, :0].movedim(1, 2)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with recorded_experts(self._routers) as read:
            yield
            self._latest = read()

    def begin(self, rows: Sequence[int]) -> None:
        self.ids[list(rows)] = OWN_CHOICE

    def fed(
        self,
        rows: Int[Tensor, " row"],
        columns: Int[Tensor, "batch new"],
        is_token: Bool[Tensor, "batch new"],
    ) -> None:
        n_samples, scratch = len(rows) // len(columns), self.ids.shape[-1] - 1
        experts = by_row(self._latest, len(columns))
        index = columns.where(is_token, scratch)[:, None, None].expand_as(experts)
        fed = self.ids[rows[::n_samples]].scatter(3, index, experts)
        self.ids[rows] = fed.repeat_interleave(n_samples, dim=0)

    def stepped(self, columns: Int[Tensor, " row"]) -> None:
        rows = torch.arange(len(columns), device=columns.device)
        self.ids[rows, :, :, columns] = self._latest.transpose(0, 1)

    def keep(self, rows: Sequence[int]) -> None:
        self.ids = self.ids[list(rows)]

    def read(self, rows: Sequence[int]) -> Int[Tensor, "row router expert seq"]:
        return self.ids[list(rows), ..., :-1].to(HOST)
