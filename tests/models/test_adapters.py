"""Tests of LoRA adapters and their target modules."""

from copy import deepcopy

import pytest
import torch

from lit_rlkv.models.adapters import (
    LoraSpec,
    active_adapter,
    add_adapter,
    check_target_modules,
    lora_layers,
    use_adapter,
)
from lit_rlkv.models.cast_linear import cache_cast_weights
from tests.models_zoo import MOE_FAMILIES, build, tiny_config, tiny_model


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["q_proj", "down_proj"], ["self_attn.v_proj"], ["embed_tokens"], r".*\.[qv]_proj"],
)
def test_names_of_modules_with_a_matrix_pass(targets):
    check_target_modules(tiny_model(), targets)


@pytest.mark.parametrize(
    ("targets", "unknown"),
    [(["zzz"], "zzz"), (["q_proj", "y", "z"], "y, z"), (["self_attn"], "self_attn"), ("q_proj", "q_proj")],
)
def test_names_that_match_nothing_are_named(targets, unknown):
    with pytest.raises(ValueError, match=f"this model has no module {unknown}; choose from .*v_proj"):
        check_target_modules(tiny_model(), targets)


@pytest.mark.parametrize("targets", [[], ""])
def test_no_module_at_all_is_refused(targets):
    with pytest.raises(ValueError, match="must name a module"):
        check_target_modules(tiny_model(), targets)


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], r".*embed_tokens"])
def test_embeddings_that_are_the_output_head_have_no_adapter(targets):
    tied = deepcopy(tiny_model())
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(ValueError, match="tied"):
        check_target_modules(tied, targets)
    with pytest.raises(ValueError, match="tied"):
        add_adapter(deepcopy(tied), "policy", LoraSpec(rank=4, alpha=8, target_modules=targets))
    check_target_modules(tied, "all-linear")


@torch.no_grad()
def test_adapters_on_bfloat16_weights_compute_in_it_and_are_kept_in_float32():
    model = deepcopy(tiny_model()).bfloat16()
    for name in ("first", "second"):
        add_adapter(model, name, LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    input_ids = torch.arange(12).view(2, 6) % 7 + 3
    alone = []
    for name in ("first", "second"):
        with use_adapter(lora_layers(model), name):
            alone.append(model(input_ids).logits)
    assert not torch.equal(*alone)
    assert model.model(input_ids).last_hidden_state.dtype == torch.bfloat16


def test_the_layers_that_hold_one_adapter_hold_the_next():
    model = deepcopy(tiny_model())
    assert lora_layers(model) == []
    add_adapter(model, "first", LoraSpec(rank=4, alpha=8, target_modules=["q_proj", "v_proj"]))
    kept = lora_layers(model)
    add_adapter(model, "second", LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    assert kept == lora_layers(model)
    assert active_adapter(kept) is None
    with use_adapter(kept, "second"):
        assert active_adapter(kept) == "second"
        with use_adapter(kept, None):
            assert active_adapter(kept) is None
        assert active_adapter(kept) == "second"


class Packed(torch.nn.Linear):
    """A matrix as bitsandbytes stores it: bytes and a compute dtype."""

    compute_dtype = torch.bfloat16

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.unpacked = linear.weight.detach()
        self.weight = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.unpacked)


@torch.no_grad()
def test_adapters_on_packed_weights_compute_in_the_precision_of_what_these_stand_for():
    models = [deepcopy(tiny_model()).bfloat16() for _ in range(2)]
    for layer in models[1].model.layers:
        layer.mlp.down_proj = Packed(layer.mlp.down_proj)
    input_ids, logits = torch.arange(12).view(2, 6) % 7 + 3, []
    for model in models:
        torch.manual_seed(0)
        add_adapter(model, "first", LoraSpec(rank=4, alpha=8, target_modules=["down_proj"]))
        for layer in lora_layers(model):
            layer.lora_B["first"].weight.normal_(std=0.1)
        plain = model(input_ids).logits
        with use_adapter(lora_layers(model), "first"):
            logits.append(model(input_ids).logits)
            with cache_cast_weights(model):
                assert torch.equal(model(input_ids).logits, logits[-1])
        assert not torch.equal(plain, logits[-1])
    assert torch.equal(*logits)


@torch.no_grad()
def test_adapters_that_are_rounded_once_say_the_same_until_the_block_ends():
    model = deepcopy(tiny_model()).bfloat16()
    add_adapter(model, "first", LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    moved = [p.normal_(std=0.1) for name, p in model.named_parameters() if "lora_B" in name]
    input_ids = torch.arange(12).view(2, 6) % 7 + 3
    with use_adapter(lora_layers(model), "first"):
        before = model(input_ids).logits
        with cache_cast_weights(model):
            assert torch.equal(model(input_ids).logits, before)
            for parameter in moved:
                parameter.mul_(2)
            assert torch.equal(model(input_ids).logits, before)
        assert not torch.equal(model(input_ids).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_mixture_of_experts_takes_two_adapters(family, dtype):
    model = build(tiny_config(family)).to(dtype)
    input_ids = torch.arange(12).view(2, 6) % 7 + 3
    plain = model(input_ids).logits
    for name in ("first", "second"):
        add_adapter(model, name, LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    layers = lora_layers(model)
    assert {tuple(sorted(layer.lora_A)) for layer in layers} == {("first", "second")}
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    logits = []
    for name in ("first", "second"):
        for layer in layers:
            layer.lora_B[name].weight.normal_(std=0.1)
        with use_adapter(layers, name), cache_cast_weights(model):
            logits.append(model(input_ids).logits)
    assert torch.equal(model(input_ids).logits, plain)
    first, second = logits
    assert all(
        float((a - b).abs().max()) > 1e-2 for a, b in [(first, plain), (second, plain), (first, second)]
    )
