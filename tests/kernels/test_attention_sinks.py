"""Attention sinks: a logit of each head in the softmax, without a value."""

import pytest
import torch

from lit_rlkv.kernels.backend import is_interpreted
from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.shadow_attention import shadow_attention
from lit_rlkv.kernels.shadow_attention.reference import visible
from lit_rlkv.kvcache.feed_attention import received_attention
from lit_rlkv.types import NEVER

BATCH, KV_HEADS, GROUP, SLOTS, DIM = 3, 2, 3, 37, 8
KERNELS = ["reference", "triton"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device, on which tensors are made by default within the test."""
    if request.param == "cpu" and not is_interpreted():
        pytest.skip("where there is a GPU kernels are not interpreted")
    with torch.device(request.param):
        yield request.param


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(
        torch.get_default_device()
    )


def decoded(sink, kernels, **options):
    query, keys = drawn(BATCH, KV_HEADS, GROUP, DIM), drawn(BATCH, KV_HEADS, SLOTS, DIM, seed=1)
    values, n_live = drawn(BATCH, KV_HEADS, SLOTS, DIM, seed=2), torch.tensor([37, 20, 1])
    return decode_attention(query, keys, values, n_live, 0.3, sink=sink, kernels=kernels, **options)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kernels", "options"), [("reference", {}), ("triton", {"n_splits": 1}), ("triton", {"n_splits": 4})]
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sink_is_a_further_logit_of_each_head(kernels, options, softcap):
    sink = drawn(KV_HEADS, GROUP, seed=3) + 1
    received = torch.zeros(BATCH, KV_HEADS, SLOTS)
    found = decoded(sink, kernels, received=received, softcap=softcap, **options)
    query, keys = drawn(BATCH, KV_HEADS, GROUP, DIM), drawn(BATCH, KV_HEADS, SLOTS, DIM, seed=1)
    logits = query @ keys.transpose(-1, -2) * 0.3
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    is_live = torch.arange(SLOTS) < torch.tensor([37, 20, 1])[:, None]
    weights = logits.exp() * is_live[:, None, None]
    probs = weights / (weights.sum(-1, keepdim=True) + sink.exp()[None, :, :, None])
    torch.testing.assert_close(
        found, probs @ drawn(BATCH, KV_HEADS, SLOTS, DIM, seed=2), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(received, probs.mean(dim=2), rtol=1e-4, atol=1e-5)
    without = decoded(None, kernels, softcap=softcap, **options)
    assert (found - without).abs().max() > 0.1  # the control: the sink left out
    tiny = decoded(torch.full((KV_HEADS, GROUP), -1e4), kernels, softcap=softcap, **options)
    torch.testing.assert_close(tiny, without)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_learners_attention_and_its_gradients_have_the_sink(kernels):
    n = 12
    given = [drawn(2, 4, n, DIM), drawn(2, 2, n, DIM, seed=1), drawn(2, 2, n, DIM, seed=2), drawn(4, seed=3)]
    evicted_at = torch.full((2, 2, n), NEVER, dtype=torch.int32)
    evicted_at[:, :, 2], evicted_at[1, :, :3] = 7, 0
    upstream = drawn(2, 4, n, DIM, seed=4)

    def gradients(attend):
        leaves = [one.clone().requires_grad_() for one in given]
        out = attend(*leaves)
        out.backward(upstream)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def expected(query, key, value, sink):
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        is_visible = visible(evicted_at).repeat_interleave(2, dim=1)
        weights = (query @ key.mT * 0.4).exp() * is_visible
        return weights / (weights.sum(-1, keepdim=True) + sink.exp()[None, :, None, None]) @ value

    def ours(query, key, value, sink):
        return shadow_attention(query, key, value, evicted_at, 0.4, sink=sink, kernels=kernels)

    for found, wanted in zip(gradients(ours), gradients(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert wanted.abs().max() > 0


@pytest.mark.parametrize("last_only", [False, True])
def test_a_sink_takes_its_share_from_what_keys_receive_at_prefill(last_only):
    query, key = drawn(2, KV_HEADS, GROUP, 9, DIM), drawn(2, KV_HEADS, 9, DIM, seed=1)
    place = torch.arange(9)
    is_prompt = place >= torch.tensor([0, 4])[:, None]

    def is_seen(queries):
        return is_prompt[:, None] & (place <= queries[:, None])

    options = {"scaling": 0.3, "softcap": None, "last_only": last_only}
    plain = received_attention(query, key, is_seen, is_prompt, **options)
    sunk = received_attention(query, key, is_seen, is_prompt, sink=torch.zeros(KV_HEADS, GROUP), **options)
    n_queries = torch.tensor([1.0, 1.0] if last_only else [9.0, 5.0])
    torch.testing.assert_close(plain.sum(-1), n_queries[:, None].expand(-1, KV_HEADS))
    assert (sunk.sum(-1) < plain.sum(-1) - 0.05).all()
