"""Forward of the learner over each different token once: no padding, and one prompt for all its responses.

Only attention carries information between tokens, as `prepare_backbone` has checked. All other layers run on
a flat sequence of the batch's tokens, in which a prompt that several rows share stands once; attention runs
on the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_rlkv.types import Record

LEAST_SAVED = 0.05
"""Share of the cells of a batch that a flat sequence must save; the copies around attention take time too."""


@dataclass(frozen=True)
class FlatTokens:
    """The tokens of a batch [batch, seq] as a flat sequence."""

    cells: Int[Tensor, " token"]
    """Index of each token's own cell in the flattened batch: that of the first row that has it."""
    place: Int[Tensor, "batch seq"]
    """Token of each cell; 0 for padding."""
    members: Bool[Tensor, "prompt batch"]
    """Rows that share each prompt; none for prompts of a single row."""
    n_columns: int
    """Columns of the longest shared prompt."""
    shared: Int[Tensor, " shared"]
    """Tokens of the shared prompts."""
    shared_cells: Int[Tensor, " shared"]
    """Their indices in the flattened [prompt, n_columns]."""

    def flatten(self, values: Tensor) -> Tensor:
        """Return the values [token, ...] of [batch, seq, ...], each from its token's own cell."""
        return values.flatten(0, 1)[self.cells]

    def flatten_columns(self, values: Tensor) -> Tensor:
        """Return [1, ..., token] of [batch, ..., seq]: a batch whose only row is the flat sequence."""
        return self.flatten(values.movedim(-1, 1)).movedim(0, -1)[None]

    def of_record(self, record: Record) -> Record:
        """Return what the flat sequence replays; evictions stay in rows, as attention does."""
        rows = record.evicted_at
        return replace(
            replace(record, evicted_at=rows[:, :0]).map_tensors(self.flatten_columns), evicted_at=rows
        )

    def spread(self, values: Tensor) -> Tensor:
        """Return [batch, seq, ...] for [token, ...]: values of each cell's token; gradients are summed."""
        out: Tensor = _Spread.apply(values, self)  # type: ignore[no-untyped-call]
        return out

    def spread_heads(self, heads: Tensor) -> Tensor:
        """Return [batch, head, seq, dim] of flat queries, keys or values [1, head, token, dim]."""
        return self.spread(heads[0].transpose(0, 1)).transpose(1, 2)

    def attend(self, attention: Callable[..., Tensor], *flat: Tensor) -> Tensor:
        """Return the result of `attention` over the rows, flat as its arguments: [1, head, token, dim]."""
        rows = map(self.spread_heads, flat)
        return self.flatten(attention(*rows).transpose(1, 2)).transpose(0, 1)[None]


class _Spread(torch.autograd.Function):
    """`FlatTokens.spread`; its backward sums without atomics, so that it is deterministic on CUDA."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: FlatTokens) -> Tensor:
        ctx.tokens = tokens
        return values.index_select(0, tokens.place.flatten()).view(*tokens.place.shape, *values.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        tokens: FlatTokens = ctx.tokens
        gradient = tokens.flatten(upstream)
        if len(tokens.shared):
            prompts = upstream[:, : tokens.n_columns].flatten(1)
            sums = (tokens.members.to(upstream.dtype) @ prompts).view(-1, *upstream.shape[2:])
            gradient[tokens.shared] = sums[tokens.shared_cells]
        return gradient, None


def flat_tokens(
    input_ids: Int[Tensor, "batch seq"],
    is_token: Bool[Tensor, "batch seq"],
    n_prompt: Int[Tensor, " batch"],
    record: Record,
) -> FlatTokens | None:
    """Return the tokens of a batch as a flat sequence; None if empty or if it saves less than `LEAST_SAVED`.

    Rows share a prompt if its tokens, its columns and what its own queries replay are equal.

    Args:
        is_token: False for cells that no other cell needs, such as padding.
        n_prompt: leading columns of each row that hold its prompt; the others are not compared.
        record: what the forward replays.
    """
    row = torch.arange(len(input_ids), device=input_ids.device)
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    is_prompt = column < n_prompt[:, None]
    leader = _leaders(input_ids, is_token, is_prompt, n_prompt, record)
    source = torch.where(is_prompt, leader[:, None], row[:, None])
    is_own = is_token & (source == row[:, None])
    cells = is_own.flatten().nonzero().flatten()
    if len(cells) == 0 or len(cells) > (1 - LEAST_SAVED) * input_ids.numel():
        return None
    number = is_own.flatten().cumsum(0).view(is_own.shape) - 1
    place = number[source, column].masked_fill(~is_token, 0)
    leaders = torch.unique(leader[leader != row])
    n_columns = int(n_prompt[leaders].max()) if len(leaders) else 0
    is_shared = (is_prompt & is_token)[leaders, :n_columns]
    return FlatTokens(
        cells=cells,
        place=place,
        members=leader == leaders[:, None],
        n_columns=n_columns,
        shared=place[leaders, :n_columns][is_shared],
        shared_cells=is_shared.flatten().nonzero().flatten(),
    )


def _leaders(
    input_ids: Int[Tensor, "batch seq"],
    is_token: Bool[Tensor, "batch seq"],
    is_prompt: Bool[Tensor, "batch seq"],
    n_prompt: Int[Tensor, " batch"],
    record: Record,
) -> Int[Tensor, " batch"]:
    """Return for each row the first row with the same prompt, or itself."""
    row = torch.arange(len(input_ids), device=input_ids.device)
    n_columns = int(n_prompt.max())
    is_prompt = is_prompt[:, :n_columns]
    prompts = torch.where(is_prompt, torch.where(is_token, input_ids, -1)[:, :n_columns], -2)
    _, group = torch.unique(prompts, dim=0, return_inverse=True)
    leader = torch.full_like(row, len(row)).scatter_reduce(0, group, row, "amin")[group]
    is_equal = torch.ones_like(leader, dtype=torch.bool)
    for table in record.of_prompts(n_prompt):
        table = table.flatten(1, -2).masked_fill(~is_prompt[:, None], 0)
        is_equal &= (table == table[leader]).flatten(1).all(dim=1)
    return torch.where(is_equal, leader, row)
