import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import shadow_attention, shadow_attention_with_lse
from lit_rlkv.kernels.shadow_attention.reference import visible
from lit_rlkv.types import NEVER
from tests.kernels.accuracy import bound

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
KV_HEADS, DIM, DIM_V = 2, 16, 8
SCALING = 1 / math.sqrt(DIM)
ODD = (33, 2)


def make_inputs(seq: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Two rows, the second with a column of padding; half of the keys die, some before any later query."""
    generator = torch.Generator().manual_seed(seq)
    query = 3 * torch.randn(2, KV_HEADS * group, seq, DIM, generator=generator)
    key = torch.randn(2, KV_HEADS, seq, DIM, generator=generator)
    value = torch.randn(2, KV_HEADS, seq, DIM_V, generator=generator)
    birth = torch.arange(seq)
    lifetime = torch.randint(1, seq + 1, (2, KV_HEADS, seq), generator=generator)
    evicted_at = torch.where(
        torch.rand(2, KV_HEADS, seq, generator=generator) < 0.5, birth + lifetime, NEVER
    ).int()
    evicted_at[1, :, 0] = 0
    return query.to(dtype), key.to(dtype), value.to(dtype), evicted_at, SCALING


def masked_softmax(query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, scaling: float) -> Tensor:
    """The definition written out: each query head loops over its queries and the keys alive then."""
    group = query.shape[1] // key.shape[1]
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            kv = h // group
            for q in range(query.shape[2]):
                alive = [
                    k for k in range(q + 1) if q < evicted_at[b, kv if evicted_at.shape[1] > 1 else 0, k]
                ]
                if alive:
                    probs = (key[b, kv, alive] @ query[b, h, q] * scaling).softmax(0)
                    out[b, h, q] = probs @ value[b, kv, alive]
    return out


def excess_error(attention: Attention, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float]) -> float:
    """Return the largest error against float64, in units of plain PyTorch's error at the inputs' dtype."""
    query, key, value, evicted_at, scaling = inputs
    truth = masked_softmax(query.double(), key.double(), value.double(), evicted_at, scaling)
    own = (masked_softmax(*inputs) - truth).abs().max()
    rounding = torch.finfo(query.dtype).eps * truth.abs().max()
    return float((attention(*inputs) - truth).abs().max() / torch.maximum(own, rounding))


@pytest.mark.parametrize(("seq", "group"), [(1, 1), (17, 4), (33, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_as_accurate_as_plain_torch(seq: int, group: int, dtype: torch.dtype):
    assert excess_error(shadow_attention, make_inputs(seq, group, dtype)) <= bound(dtype)


@pytest.mark.parametrize("shift", [1, -1])
def test_the_comparison_catches_evictions_off_by_one(shift: int):
    def shifted(query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, scaling: float) -> Tensor:
        return shadow_attention(
            query, key, value, torch.where(evicted_at < NEVER, evicted_at + shift, evicted_at), scaling
        )

    assert excess_error(shifted, make_inputs(*ODD, torch.float32)) > 100.0


def test_the_comparison_catches_swapped_kv_heads():
    def swapped(query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, scaling: float) -> Tensor:
        return shadow_attention(query, key, value, evicted_at.flip(1), scaling)

    assert excess_error(swapped, make_inputs(*ODD, torch.float32)) > 100.0


def test_one_table_can_serve_all_heads():
    query, key, value, evicted_at, scaling = make_inputs(*ODD, torch.float32)
    shared = evicted_at[:, :1]
    out = shadow_attention(query, key, value, shared, scaling)
    torch.testing.assert_close(
        out, shadow_attention(query, key, value, shared.expand(-1, KV_HEADS, -1), scaling)
    )


def test_a_query_sees_a_key_from_its_column_until_its_eviction():
    # Key 0 dies at 2, key 1 lives on, key 2 is padding, key 3 dies at 4, which is beyond the sequence.
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1]]
    assert visible(torch.tensor([2, NEVER, 0, 4])).int().tolist() == expected


def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients():
    query, key, value, _, scaling = make_inputs(17, 2, torch.float32)
    evicted_at = torch.full((2, KV_HEADS, 17), NEVER, dtype=torch.int32)
    evicted_at[0] = 0
    evicted_at[1, :, :5] = 0
    inputs = [t.requires_grad_() for t in (query, key, value)]
    out = shadow_attention(query, key, value, evicted_at, scaling)
    assert (out[0] == 0).all()
    assert (out[1, :, :5] == 0).all()
    assert (out[1, :, 5:] != 0).all()
    for gradient in torch.autograd.grad(out.square().sum(), inputs):
        assert gradient.isfinite().all()
        assert (gradient[0] == 0).all()


def test_gradients_are_those_of_finite_differences():
    # One row with padding, one KV head of two query heads, few dimensions: finite differences are slow.
    query, key, value, evicted_at, scaling = make_inputs(4, 2, torch.float64)
    inputs = tuple(
        t.requires_grad_() for t in (query[1:, :2, :, :3], key[1:, :1, :, :3], value[1:, :1, :, :2])
    )
    evicted_at = evicted_at[1:, :1]
    assert torch.autograd.gradcheck(lambda *qkv: shadow_attention(*qkv, evicted_at, scaling), inputs)
    for softcap in (None, 2.0):
        assert torch.autograd.gradcheck(
            lambda *qkv, cap=softcap: finite(
                *shadow_attention_with_lse(*qkv, evicted_at, scaling, softcap=cap)
            ),
            inputs,
        )


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the -inf of queries that see no key by 0, because -inf has no finite difference."""
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def test_log_sum_exp_matches_hand_arithmetic():
    # One dimension, queries of 1: logits are the keys. Query 0 sees key 0, query 1 both, query 2 only key 2.
    key = torch.tensor([0.0, math.log(3), 5.0]).view(1, 1, 3, 1)
    evicted_at = torch.tensor([[[2, 2, NEVER]]]).int()
    out, lse = shadow_attention_with_lse(torch.ones_like(key), key, key, evicted_at, 1.0)
    assert lse.flatten().tolist() == pytest.approx([0.0, math.log(4), 5.0])
    assert out.flatten().tolist() == pytest.approx([0.0, 0.75 * math.log(3), 5.0])


def test_a_soft_cap_bounds_the_logits():
    # A logit of 3 under a cap of 2 is 2 tanh(3 / 2).
    one = torch.ones(1, 1, 1, 1)
    evicted_at = torch.tensor([[[NEVER]]]).int()
    _, lse = shadow_attention_with_lse(3 * one, one, one, evicted_at, 1.0, softcap=2.0)
    assert lse.item() == pytest.approx(2 * math.tanh(1.5))


def test_log_sum_exp_of_a_query_that_sees_nothing_is_minus_infinity():
    query, key, value, evicted_at, scaling = make_inputs(17, 2, torch.float16)
    lse = shadow_attention_with_lse(query, key, value, evicted_at, scaling)[1]
    assert lse.dtype == torch.float32
    assert (lse[1, :, 0] == -torch.inf).all()
    assert lse[0].isfinite().all()
