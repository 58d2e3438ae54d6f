"""Cases of decode attention: with and without the scores that eviction needs, against torch's SDPA."""

from functools import partial

import torch
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import decode_work
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.decode_attention import decode_attention

REAL = [(64, 8, 4, 128, slots) for slots in (2048, 4096, 8192)] + [
    (batch, 8, 4, 128, slots) for batch in (1, 8) for slots in (2048, 8192)
]
TOY = [(2, 2, 4, 16, slots) for slots in (33, 64)] + [(1, 2, 4, 16, 600)]
"""batch, KV heads, group, dim, slots; the last toy one is shared by several programs."""


def cases(setting: Setting) -> Builders:
    """From many slots and rows to few rows, where programs have to share a row's slots."""
    for batch, n_kv_heads, group, dim, slots in TOY if setting.is_toy else REAL:
        label = f"batch {batch}, {slots} slots"
        yield label, partial(_case, setting, label, batch, n_kv_heads, group, dim, slots)


def _case(
    setting: Setting, label: str, batch: int, n_kv_heads: int, group: int, dim: int, slots: int
) -> Case:
    query = setting.random(batch, n_kv_heads, group, dim, seed=0)
    keys, values = (setting.random(batch, n_kv_heads, slots, dim, seed=seed) for seed in (1, 2))
    n_live = torch.full((batch,), slots, device=setting.device)
    received = torch.zeros(batch, n_kv_heads, slots, device=setting.device)
    pool = (query, keys, values, n_live, dim**-0.5)
    ours = partial(decode_attention, *pool, kernels=setting.timed_kernels)
    work = partial(decode_work, batch * n_kv_heads, group, slots, dim, keys.element_size())
    return Case(
        op="decode_attention",
        label=label,
        sizes={"batch": batch, "kv_heads": n_kv_heads, "group": group, "dim": dim, "slots": slots},
        arms=(
            Arm(
                "scores added up", partial(ours, received=received, accumulates=True), work(n_score_passes=2)
            ),
            Arm("scores written", partial(ours, received=received), work(n_score_passes=1)),
            Arm("no scores", ours, work(n_score_passes=0)),
            Arm("torch SDPA", partial(torch_sdpa, query, keys, values), work(n_score_passes=0)),
        ),
        check=partial(check, label, *pool),
        inputs=(query, keys, values, n_live, received),
    )


def torch_sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return attention over the same slots, all live, by torch's SDPA and the backend that it picks."""
    out = F.scaled_dot_product_attention(query.flatten(1, 2)[:, :, None], keys, values, enable_gqa=True)
    return out.view(query.shape)


def check(
    label: str, query: Tensor, keys: Tensor, values: Tensor, n_live: Tensor, scaling: float, attend=None
) -> float:
    """First and last row with half and all of their slots live, against float64; scores twice added up."""
    attend = attend or partial(decode_attention, kernels="triton")
    rows = torch.tensor(sorted({0, len(query) - 1}), device=query.device)
    error = 0.0
    for live in (n_live, n_live // 2 + 1):
        before = 1.0 / keys.shape[2]
        received = torch.full(keys.shape[:3], before, device=query.device)
        out = attend(query, keys, values, live, scaling, received=received, accumulates=True)
        received_plain = torch.full((len(rows), *keys.shape[1:3]), before, device=query.device)
        some = (query[rows], keys[rows], values[rows], live[rows], scaling)
        plain = decode_attention(*some, received=received_plain, accumulates=True, kernels="reference")
        truth, share = _truth(*some)
        is_newest = torch.arange(keys.shape[2], device=keys.device) == live[rows, None, None] - 1
        expected = share + before * (~is_newest)
        expected[_is_dead(keys[rows], live[rows])] = before  # untouched
        results = {
            "out": (out[rows], plain, truth),
            "received": (received[rows], received_plain, expected),
        }
        error = max(error, require_accurate(f"decode_attention, {label}", results))
    return error


def _truth(
    query: Tensor, keys: Tensor, values: Tensor, n_live: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output and received attention in float64."""
    logits = query.double() @ keys.double().mT * scaling
    probs = logits.masked_fill(_is_dead(keys, n_live)[:, :, None], -torch.inf).softmax(-1)
    return probs @ values.double(), probs.mean(2)


def _is_dead(keys: Tensor, n_live: Tensor) -> Tensor:
    slot = torch.arange(keys.shape[2], device=keys.device)
    return (slot >= n_live[:, None, None]).expand(keys.shape[:3])
