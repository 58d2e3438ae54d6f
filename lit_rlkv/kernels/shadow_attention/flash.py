"""torch's flash attention over sequences of different lengths: forward with log-sum-exp, and backward."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

aten = torch.ops.aten
MAX_HEAD_DIM = 256
"""Most dimensions of a head on CUDA, where they must be a multiple of 8."""


class Call(NamedTuple):
    """The sequences of a call; their queries [query, head, dim] and keys stand one after another."""

    query_starts: Int[Tensor, " sequence_and_end"]
    key_starts: Int[Tensor, " sequence_and_end"]
    longest: int
    """Most queries of a sequence."""
    most_keys: int
    window: int | None
    """Keys that a query sees up to its own, the last key for the last query; 0: all; None: not causal."""
    scaling: float


class Library(NamedTuple):
    """Flash attention on one kind of device."""

    dtypes: tuple[torch.dtype, ...]
    has_windows: bool
    forward: Callable[..., tuple[Tensor, ...]]
    """Takes query, key, value and the call; returns the output and the log-sum-exp [query, head]."""
    backward: Callable[..., tuple[Tensor, ...]]
    """Takes d_out, query, key, value, the output and log-sum-exp of the whole softmax, and the call."""


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    sizes, is_causal, options = _cuda_settings(call)
    found = aten._flash_attention_forward(query, key, value, *sizes, 0.0, is_causal, False, **options)
    return found[0], found[1].mT


def _cuda_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, ...]:
    sizes, is_causal, options = _cuda_settings(call)
    draws = torch.zeros(2, dtype=torch.uint64, device=lse.device), torch.empty(0, device=lse.device)
    found = aten._flash_attention_backward(
        d_out, query, key, value, out, lse.mT.contiguous(), *sizes, 0.0, is_causal, *draws, **options
    )
    return tuple(found)


def _cuda_settings(call: Call) -> tuple[tuple[Tensor | int, ...], bool, dict[str, float]]:
    # With a single query in each sequence the library would lay the log-sum-exp out in another way.
    sizes = (call.query_starts, call.key_starts, max(call.longest, 2), call.most_keys)
    left, right = (call.window or 0) - 1, -1 if call.window is None else 0
    options = {"scale": call.scaling, "window_size_left": left, "window_size_right": right}
    return sizes, call.window is not None, options


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    run = aten._scaled_dot_product_flash_attention_for_cpu
    return _by_shape(lambda q, *kv: run(q, *kv, **_cpu_settings(call)), call, [query], [key, value])


def _cpu_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, ...]:
    run = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return _by_shape(
        lambda d_o, q, o, lse, *kv: run(d_o, q, *kv, o, lse, dropout_p=0.0, **_cpu_settings(call)),
        call,
        [d_out, query, out, lse],
        [key, value],
    )


def _cpu_settings(call: Call) -> dict[str, float]:
    assert not call.window
    return {"is_causal": call.window is not None, "scale": call.scaling}


def _by_shape(
    run: Callable[..., tuple[Tensor, ...]], call: Call, of_queries: list[Tensor], of_keys: list[Tensor]
) -> tuple[Tensor, ...]:
    """Run sequences of equal shapes that follow each other as a batch [sequence, head, query or key, dim]."""
    shapes = torch.stack([call.query_starts.diff(), call.key_starts.diff()], dim=1)
    shapes, counts = torch.unique_consecutive(shapes, dim=0, return_counts=True)
    parts = []
    n_queries, n_keys = (shapes * counts[:, None]).T.tolist()
    queries_by_shape = zip(*(torch.split(t, n_queries) for t in of_queries), strict=True)
    keys_by_shape = zip(*(torch.split(t, n_keys) for t in of_keys), strict=True)
    for n, queries, keys in zip(counts.tolist(), queries_by_shape, keys_by_shape, strict=True):
        found = run(*(t.view(n, -1, *t.shape[1:]).transpose(1, 2) for t in (*queries, *keys)))
        parts.append([each.transpose(1, 2).flatten(0, 1) for each in found])
    return tuple(map(torch.cat, zip(*parts, strict=True)))


HALF = (torch.float16, torch.bfloat16)
LIBRARIES = {
    "cuda": Library(HALF, True, _cuda_forward, _cuda_backward),
    "cpu": Library((*HALF, torch.float32, torch.float64), False, _cpu_forward, _cpu_backward),
}
"""By type of device."""


def fits(device: str, dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    """Return True if the library of the device takes heads of `width` dimensions in this dtype."""
    has_kernel = device in LIBRARIES and dtype in LIBRARIES[device].dtypes and softcap is None
    return has_kernel and (device == "cpu" or (width % 8 == 0 and width <= MAX_HEAD_DIM))
