"""Policies weigh values by the output projection that the sampler runs with."""

from copy import deepcopy

import pytest
import torch

from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.models.output_projection import output_projections
from tests.models_zoo import HEADS, tiny_model
from tests.rollouts import gap, gaps, roll_out, spec_of

WEIGHED = {"policy_options": {"value_norms": True}}


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_a_projection_is_the_weight_without_its_bias(family):
    model = deepcopy(tiny_model(family))
    linear = model.model.layers[1].self_attn.o_proj
    linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))
    projection = output_projections(model)[1]
    assert torch.equal(weight := projection(), linear.weight.T)
    assert weight.data_ptr() == linear.weight.data_ptr()  # a compaction costs no product with units
    linear.__class__ = type("Quantized", (torch.nn.Linear,), {})
    torch.testing.assert_close(projection(), linear.weight.detach().T)
    assert weight.shape[0] % HEADS == 0


def test_a_projection_follows_the_adapter_as_it_learns():
    model = deepcopy(tiny_model())
    add_adapter(model, "policy", LoraSpec(rank=2, alpha=4, target_modules="all-linear"))
    projection, linear = output_projections(model)[0], model.model.layers[0].self_attn.o_proj
    before = projection()
    with torch.no_grad():
        linear.lora_B["policy"].weight.normal_()
    change = 2 * linear.lora_B["policy"].weight @ linear.lora_A["policy"].weight
    assert torch.equal(projection(), before)  # the adapter is not in use
    with use_adapter(lora_layers(model), "policy"):
        found = projection() - before
    torch.testing.assert_close(found, change.detach().T, atol=1e-4, rtol=1e-4)
    assert change.abs().max() > 0.1


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova", "expected"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "int8"}, {"protect_prompt": True}], ids=str)
def test_rollouts_by_value_norms_are_replayed_exactly(policy, changes):
    rollout = roll_out(cache=spec_of(policy, **changes, **WEIGHED))
    assert gap("llama", rollout) < 1e-4
    if not changes:
        assert not torch.equal(rollout.evicted_at, roll_out(cache=policy).evicted_at)
        assert gaps("llama", rollout, shadow=False).max() > 1e-2


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_windows_and_latent_attention_take_value_norms(family):
    assert gap(family, roll_out(family, spec_of("snapkv", **WEIGHED))) < 1e-4


def test_a_model_without_o_proj_is_refused():
    with pytest.raises(ValueError, match=r"cache\.policy=h2o weighs values by the output projection o_proj"):
        roll_out("gpt2", spec_of("h2o", **WEIGHED))


def test_policies_with_negative_scores_take_no_value_norms():
    with pytest.raises(ValueError, match="have no effect on rkv; leave them out"):
        spec_of("rkv", **WEIGHED)
    with pytest.raises(ValueError, match="value_norms must be true or false, got 'yes'; choose one"):
        spec_of("h2o", policy_options={"value_norms": "yes"})
