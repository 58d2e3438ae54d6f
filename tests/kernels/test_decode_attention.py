import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.decode_attention import decode_attention

KV_HEADS, DIM, DIM_V, SCALING = 2, 16, 8, 0.25


def make_inputs(n_slots: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_slots)
    query = 3 * torch.randn(3, KV_HEADS, group, DIM, generator=generator)
    keys = torch.randn(3, KV_HEADS, n_slots, DIM, generator=generator)
    values = torch.randn(3, KV_HEADS, n_slots, DIM_V, generator=generator)
    # Rows have filled all slots, about half of them, and one.
    is_live = torch.arange(n_slots) < torch.tensor([n_slots, (n_slots + 1) // 2, 1])[:, None]
    return query.to(dtype), keys.to(dtype), values.to(dtype), is_live


def written_out(query: Tensor, keys: Tensor, values: Tensor, is_live: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*query.shape[:3], DIM_V, dtype=query.dtype)
    probs = torch.zeros(*query.shape[:3], keys.shape[2], dtype=query.dtype)
    for b in range(query.shape[0]):
        n = int(is_live[b].sum())
        for h in range(KV_HEADS):
            probs[b, h, :, :n] = (query[b, h] @ keys[b, h, :n].T * SCALING).softmax(-1)
            out[b, h] = probs[b, h] @ values[b, h]
    return out, probs


def excess_errors(inputs: tuple[Tensor, Tensor, Tensor, Tensor], is_live: Tensor) -> list[float]:
    """Largest errors of outputs and probabilities against float64, in units of plain PyTorch's own."""
    query, keys, values, true_live = inputs
    truths = written_out(query.double(), keys.double(), values.double(), true_live)
    errors = []
    for actual, own, truth in zip(
        decode_attention(query, keys, values, is_live, SCALING), written_out(*inputs), truths, strict=True
    ):
        rounding = torch.finfo(query.dtype).eps * truth.abs().max()
        errors.append(
            float((actual - truth).abs().max() / torch.maximum((own - truth).abs().max(), rounding))
        )
    return errors


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("n_slots", [1, 17, 63])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_slots_is_as_accurate_as_plain_torch(n_slots: int, group: int, dtype: torch.dtype):
    inputs = make_inputs(n_slots, group, dtype)
    assert max(excess_errors(inputs, inputs[3])) <= 2.0


def test_the_comparison_catches_one_slot_too_many():
    inputs = make_inputs(17, 2, torch.float32)
    one_more = inputs[3].roll(1, dims=1) | inputs[3]
    assert min(excess_errors(inputs, one_more)) > 10.0


def test_dead_slots_get_no_probability_whatever_they_hold():
    query, keys, values, is_live = make_inputs(17, 2, torch.float32)
    junk = torch.where(is_live[:, None, :, None], keys, 1e4)
    out, probs = decode_attention(query, junk, values, is_live, SCALING)
    assert (probs.masked_select(~is_live[:, None, None].expand_as(probs)) == 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, KV_HEADS, 2))
    assert torch.equal(out, decode_attention(query, keys, values, is_live, SCALING)[0])


def test_probabilities_are_float32_for_the_policies_also_when_the_cache_is_not():
    out, probs = decode_attention(*make_inputs(17, 2, torch.bfloat16), SCALING)
    assert (out.dtype, probs.dtype) == (torch.bfloat16, torch.float32)
