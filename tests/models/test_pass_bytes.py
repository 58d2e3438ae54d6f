"""Bytes of a pass by the tensors that layers save; tests/benchmarks compares with live tensors."""

import copy

import pytest
import torch

from lit_rlkv.kvcache.policies import Learned
from lit_rlkv.models import activations
from lit_rlkv.models.adapters import LoraSpec, add_adapter
from lit_rlkv.models.kv_scorer import add_kv_scorer
from lit_rlkv.models.pass_bytes import BATCH_BYTES, PassBytes
from tests.hand_built import make_model
from tests.models_zoo import tiny_model

D, Q, K, F, HEADS, KV_HEADS, LAYERS = 32, 32, 16, 64, 4, 2, 4


def qwen3():
    return make_model(num_hidden_layers=LAYERS, intermediate_size=F, head_dim=8).requires_grad_(True)


def test_all_activations_are_those_of_the_formula():
    count = PassBytes(qwen3(), is_fused=True)
    normed = 2 * D + Q + K
    # Inputs of norms and what they norm, since their weights train; of linears and attention, and its output
    # in both layouts; of the MLP gate, silu(gate), up and their product; a number of each norm, and lse.
    numbers = 2 * normed + 2 * D + 3 * Q + 2 * K + 4 * F + 2 + HEADS + KV_HEADS + HEADS
    longer, shorter = (count.of_pass(2, n_columns, False)["kept"] for n_columns in (3000, 2000))
    assert longer - shorter == pytest.approx(4 * LAYERS * 2 * 1000 * numbers, rel=0.01)
    assert count.of_pass(2, 3000, False)["batch"] == 6000 * BATCH_BYTES


def test_checkpoints_keep_inputs_and_host_two_of_them():
    count = PassBytes(qwen3(), is_fused=True)
    assert count.of_pass(1, 3000, True)["kept"] == LAYERS * 3000 * D * 4
    assert count.of_pass(1, 3000, "host")["kept"] == 2 * 3000 * D * 4
    backward = count.of_pass(1, 3000, True)["backward"]
    assert count.of_pass(1, 3000, "host")["backward"] == backward


def test_tiles_bound_what_an_mlp_adds(monkeypatch):
    count = PassBytes(qwen3(), is_fused=True)
    whole = count.of_pass(1, 4096, True)["backward"]
    monkeypatch.setattr(activations, "TILE", 64)
    assert count.of_pass(1, 4096, True)["backward"] < whole - 4096 * 4 * 4 * F


def test_it_needs_no_weights():
    model = qwen3()
    model.requires_grad_(False)
    add_adapter(model, "policy", LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    expected = PassBytes(model, is_fused=True).of_pass(3, 2000, True)
    assert PassBytes(copy.deepcopy(model).to("meta"), is_fused=True).of_pass(3, 2000, True) == expected


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("trains_all", [False, True])
def test_autocast_is_counted_without_it(trains_all, checkpoints):
    model = qwen3().requires_grad_(trains_all)
    if not trains_all:
        add_adapter(model, "policy", LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    with torch.autocast("cpu", torch.bfloat16):
        expected = PassBytes(model, is_fused=True).of_pass(3, 2000, checkpoints)
    model.to("meta")
    found = PassBytes(model, is_fused=True, autocast=torch.bfloat16).of_pass(3, 2000, checkpoints)
    assert found == pytest.approx(expected, rel=0.01)
    assert found != pytest.approx(PassBytes(model, is_fused=True).of_pass(3, 2000, checkpoints), rel=0.05)


def test_layers_may_get_their_input_by_name():
    model = qwen3()
    expected = PassBytes(model).of_pass(3, 2000, True)
    for layer in activations.checkpointed_layers(model):
        layer.register_forward_pre_hook(
            lambda layer, args, named: ((), {"hidden_states": args[0], **named}), with_kwargs=True
        )
    assert PassBytes(model).of_pass(3, 2000, True) == expected


def test_a_trained_scorer_keeps_the_keys_and_values_that_checkpoints_do_not():
    model = qwen3()
    plain = [PassBytes(model).of_pass(1, 10, checkpoints)["kept"] for checkpoints in (False, True)]
    scorer = add_kv_scorer(model, Learned())
    trained = [PassBytes(model).of_pass(1, 10, checkpoints)["kept"] for checkpoints in (False, True)]
    assert [b - a for a, b in zip(plain, trained, strict=True)] == [0, 4 * 2 * LAYERS * 10 * K]
    scorer.requires_grad_(False)
    assert PassBytes(model).of_pass(1, 10, True)["kept"] == plain[1]


def test_a_count_leaves_the_model_as_it_was():
    model = copy.deepcopy(tiny_model())
    activations.checkpoint_layers(model, True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        PassBytes(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
