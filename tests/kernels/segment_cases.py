"""Segments of hand-made tables, with a plain library that has the windows which torch's for CPUs lacks."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import LayerSegments, flash, plan_segments, segment_plan


class PlainLibrary:
    """The library of `flash` in plain torch, sequence by sequence under a mask; counts its calls."""

    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    has_windows = True

    def __init__(self) -> None:
        self.calls: list[flash.Call] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: flash.Call) -> tuple[Tensor, Tensor]:
        self.calls.append(call)
        outs, lses = [], []
        for logits, _, of_keys in self._sequences(query, key, call):
            lse = logits.logsumexp(-1, keepdim=True)
            outs.append(((logits - lse).exp() @ repeated(value[of_keys], logits)).transpose(0, 1))
            lses.append(lse[..., 0].mT)
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: flash.Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_query, d_key, d_value = (torch.zeros_like(each) for each in (query, key, value))
        for logits, of_queries, of_keys in self._sequences(query, key, call):
            upstream, q, o = (each[of_queries].transpose(0, 1) for each in (d_out, query, out))
            k, v = (repeated(each[of_keys], logits) for each in (key, value))
            probs = (logits - lse[of_queries].mT[..., None]).exp()
            d_logits = probs * (upstream @ v.mT - (upstream * o).sum(-1, keepdim=True)) * call.scaling
            d_query[of_queries] = (d_logits @ k).transpose(0, 1)
            for total, each in ((d_key, d_logits.mT @ q), (d_value, probs.mT @ upstream)):
                total[of_keys] = each.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
        return d_query, d_key, d_value

    def _sequences(
        self, query: Tensor, key: Tensor, call: flash.Call
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield masked logits [head, query, key], and the slices of the queries and keys."""
        starts = zip(call.query_starts.tolist(), call.key_starts.tolist(), strict=True)
        begins = next(starts)
        for ends in starts:
            of_queries, of_keys = map(slice, begins, ends)
            n_queries, n_keys = (end - begin for begin, end in zip(begins, ends, strict=True))
            assert 0 < n_queries <= call.longest
            assert 0 < n_keys <= call.most_keys
            logits = query[of_queries].transpose(0, 1) @ repeated(key[of_keys], query.transpose(0, 1)).mT
            last = torch.arange(n_queries)[:, None] + n_keys - n_queries  # the key at each query's own place
            age = last - torch.arange(n_keys)
            is_hidden = (age < 0) & (call.window is not None) | (age >= (call.window or n_keys + n_queries))
            yield (logits * call.scaling).masked_fill(is_hidden, -torch.inf), of_queries, of_keys
            begins = ends


def repeated(values: Tensor, like: Tensor) -> Tensor:
    """Return keys or values [key, kv_head, dim] as [head, key, dim]."""
    return values.transpose(0, 1).repeat_interleave(len(like) // values.shape[1], dim=0)


def segments_of(evicted_at: Tensor, n_kv_heads: int) -> LayerSegments:
    """Return the segments of a table [batch kv_head seq], also where they would not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_plan, "MIN_QUERIES", 1)
        patch.setattr(segment_plan, "MAX_OLD", 10**9)
        plan = plan_segments(evicted_at[:, None])
    assert plan is not None
    layer = plan.layer(0, n_kv_heads)
    assert layer is not None
    return layer
