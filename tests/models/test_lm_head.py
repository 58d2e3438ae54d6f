"""The LM head: float32 logits from 16-bit operands, in sampler and learner alike."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import CohereConfig, GraniteConfig

from lit_rlkv import prepare_backbone
from lit_rlkv.kernels.token_logps import token_logps
from lit_rlkv.models import lm_head
from lit_rlkv.models.backbone import head_logits, hidden_states, token_positions
from lit_rlkv.models.cast_linear import cache_cast_weights
from lit_rlkv.models.lm_head import LMHead
from lit_rlkv.types import Record
from tests.models_zoo import SIZE, VOCAB, build, ragged_prompts, tiny_config

HALVES = [torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_head(dtype: torch.dtype, *, bias: bool = False, device: str = "cpu") -> LMHead:
    torch.manual_seed(0)
    head = LMHead(48, 101, bias=bias)
    nn.init.normal_(head.weight)
    return head.to(device, dtype)


def plain(head: LMHead, hidden: torch.Tensor) -> torch.Tensor:
    """The product in the precision of the operands, rounded to it."""
    return F.linear(hidden, head.weight, head.bias)


def exact(head: LMHead, hidden: torch.Tensor) -> torch.Tensor:
    bias = None if head.bias is None else head.bias.double()
    return F.linear(hidden.double(), head.weight.double(), bias)


@pytest.fixture(params=[48 * 7, 2**20], ids=["chunks", "one chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(lm_head, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,), ()], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_16_bit_operands_are_not_rounded_to_16_bit(device, lead, dtype, bias):
    head, hidden = make_head(dtype, bias=bias, device=device), torch.randn(*lead, 48).to(device, dtype)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape == (*lead, 101)
    torch.testing.assert_close(logits.double(), exact(head, hidden), rtol=1e-5, atol=1e-5)
    if logits.numel() > 0:  # the control: what the head returned before
        assert (plain(head, hidden).double() - exact(head, hidden)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wide_head_computes_as_before(dtype):
    head, hidden = make_head(dtype, bias=True), torch.randn(3, 48, dtype=dtype)
    assert torch.equal(head(hidden), plain(head, hidden))


def gradients(head: LMHead, forward, hidden: torch.Tensor, upstream: torch.Tensor):
    """The gradients of the hidden states and of the weight, in the dtypes in which autograd gives them."""
    hidden = hidden.detach().requires_grad_()
    logits = forward(head, hidden)
    return torch.autograd.grad(logits, (hidden, head.weight), upstream.to(logits.dtype))


def errors(found, true):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, true, strict=True)]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_as_accurate_as_torch_in_16_bit(device, dtype):
    head = make_head(dtype, device=device)
    hidden, upstream = torch.randn(33, 48).to(device, dtype), torch.randn(33, 101).to(device)
    found = gradients(head, LMHead.forward, hidden, upstream)
    assert [gradient.dtype for gradient in found] == [dtype, dtype]
    true = gradients(head, exact, hidden, upstream)
    theirs = errors(gradients(head, plain, hidden, upstream), true)
    assert all(ours <= 2 * their for ours, their in zip(errors(found, true), theirs, strict=True))
    shifted = errors(gradients(head, LMHead.forward, hidden, upstream.roll(1, dims=1)), true)
    assert all(wrong > 10 * their for wrong, their in zip(shifted, theirs, strict=True))


def test_a_frozen_head_gets_no_gradient_and_hidden_states_may_need_none():
    head, hidden = make_head(torch.bfloat16), torch.randn(3, 48).bfloat16()
    head(hidden).sum().backward()
    assert head.weight.grad is not None
    head.requires_grad_(False)
    assert not head(hidden).requires_grad
    assert head(hidden.requires_grad_()).requires_grad


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_rounds_the_operands_and_not_the_logits(device):
    head = make_head(torch.float32, bias=True, device=device)
    hidden, upstream = torch.randn(33, 48).to(device), torch.randn(33, 101).to(device)
    halves = copy.deepcopy(head).bfloat16()
    halves.bias.data = head.bias.data  # autocast does not round what is added in float32
    with torch.autocast(device, torch.bfloat16):
        logits = head(hidden)
        assert plain(head, hidden).dtype == torch.bfloat16  # the control
        found = gradients(head, LMHead.forward, hidden, upstream)
    torch.testing.assert_close(logits, halves(hidden.bfloat16()), rtol=1e-6, atol=1e-5)
    assert [gradient.dtype for gradient in found] == [torch.float32, torch.float32]
    expected = gradients(halves, LMHead.forward, hidden.bfloat16(), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_a_rollout_under_autocast_rounds_the_weight_once():
    model = prepare_backbone(build(tiny_config("llama")))
    head, hidden = model.get_output_embeddings(), torch.randn(3, SIZE["hidden_size"])
    with torch.autocast("cpu", torch.bfloat16):
        before = head(hidden)
        with cache_cast_weights(model):
            assert head.cached_weight.dtype == torch.bfloat16
            assert torch.equal(head(hidden), before)
            head.weight.mul_(2)
            assert torch.equal(head(hidden), before)
        assert not torch.equal(head(hidden), before)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_prepared_model_keeps_name_weight_and_hooks_of_its_head(is_tied):
    model, seen = build(tiny_config("llama", tie_word_embeddings=is_tied)), []
    names = set(model.state_dict())
    model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(1))
    model = copy.deepcopy(prepare_backbone(model.bfloat16()))
    head = model.get_output_embeddings()
    assert isinstance(head, LMHead)
    assert set(model.state_dict()) == names
    assert (head.weight is model.get_input_embeddings().weight) == is_tied
    n_seen = len(seen)
    assert model(ragged_prompts()[0]).logits.dtype == torch.float32
    assert len(seen) == n_seen + 1


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SIZE, logits_scaling=4.0),
        CohereConfig(**SIZE, logit_scale=0.25),
        tiny_config("gemma3", final_logit_softcapping=5.0),
    ],
    ids=lambda config: type(config).__name__,
)
@torch.no_grad()
def test_scalings_and_softcaps_are_computed_in_float32(config):
    model = prepare_backbone(build(config).bfloat16())
    input_ids = ragged_prompts()[0]
    hidden = model.base_model(input_ids).last_hidden_state
    head = model.get_output_embeddings()
    found = head_logits(model, hidden)
    assert found.dtype == torch.float32
    model.set_output_embeddings(nn.Linear(*head.weight.T.shape, bias=False, dtype=torch.float64))
    model.get_output_embeddings().weight.data = head.weight.double()
    true = head_logits(model, hidden.double())
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-6)
    assert (found.bfloat16().double() - true).abs().max() > 1e-4  # the control: rounding would be seen


def logp_changes(dtype: torch.dtype, *, is_rounded: bool) -> torch.Tensor:
    """Changes of log-probs where one number of each hidden state is rounded the other way."""
    torch.manual_seed(0)
    head = LMHead(256, 512, bias=False).to(dtype)
    nn.init.normal_(head.weight, std=0.3)  # logits reach 15
    hidden = torch.randn(200, 256).to(dtype)
    other = hidden.clone()
    other[:, 0] *= 1 + torch.finfo(dtype).eps
    assert ((other != hidden).sum(dim=1) == 1).all()

    def logps(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        return (logits.to(dtype).float() if is_rounded else logits).log_softmax(-1)

    return (logps(hidden) - logps(other)).abs()


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES)
def test_the_last_bit_of_a_hidden_state_moves_no_logit_by_a_whole_step_of_16_bit(dtype):
    ours, rounded = logp_changes(dtype, is_rounded=False), logp_changes(dtype, is_rounded=True)
    step = 8 * torch.finfo(dtype).eps  # of logits from 8 to 16
    assert rounded.max() > 0.9 * step  # the control
    assert ours.max() < 0.5 * step
    assert ours.mean() < 0.7 * rounded.mean()


def test_log_probs_of_a_learner_and_of_a_decode_step_see_the_same_logits():
    model = prepare_backbone(build(tiny_config("llama")).bfloat16())
    input_ids, is_prompt = ragged_prompts()
    positions = token_positions(is_prompt)
    hidden = hidden_states(model, input_ids, positions, record=Record.dense(is_prompt))[is_prompt].detach()
    tokens = input_ids[is_prompt]
    found = token_logps(hidden, partial(head_logits, model), tokens, 1.0, VOCAB)
    logits = F.linear(hidden.double(), model.get_output_embeddings().weight.double())
    true = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-5)
    rounded = logits.bfloat16().double().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    assert (rounded - true).abs().max() > 1e-4


def test_no_position_at_all_has_gradients_of_0_under_autocast():
    head = LMHead(8, 5, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        head(torch.zeros(0, 8, requires_grad=True)).sum().backward()
    assert torch.equal(head.weight.grad, torch.zeros(5, 8))
