"""Models with recurrent layers beside attention: states go with the rows, budgets bound the keys alone."""

import pytest
import torch
from transformers import FalconH1Config, Lfm2Config, NemotronHConfig, Qwen3NextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from lit_rlkv.kvcache import state_layer
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.backbone import layer_kinds, table_rows
from tests.models_zoo import SIZE, build, own_logps
from tests.rollouts import LENS, gap, roll_out, spec_of

LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
MIXED = ["linear_attention", "full_attention"]
CONFIGS = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZE, **LINEAR, layer_types=MIXED),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZE, **LINEAR, layer_types=MIXED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": lambda: Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]),
    "falcon_h1": lambda: FalconH1Config(**SIZE, **MAMBA, head_dim=8),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZE | {"num_hidden_layers": 3}, layer_types=["linear_attention", "mlp", "full_attention"],
        mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=4, n_groups=1, head_dim=8,
    ),
}  # fmt: skip
SPARSE = spec_of("snapkv")


def hybrid(name):
    model = build(CONFIGS[name]())
    with torch.no_grad():  # what starts at 0 or 1 shall have an effect
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.05
            )
    return model


def sampled(model, cache=SPARSE):
    generator = torch.Generator().manual_seed(1)
    options = {"num_return_sequences": 2, "eos_token_id": 3, "generator": generator}
    return roll_out(model, cache, max_new_tokens=12, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_replay_is_exact_and_a_dense_learner_is_not(name):
    model = prepare_backbone(hybrid(name))
    rollout = sampled(model)
    assert gap(model, rollout) < 1e-4
    assert gap(model, rollout, shadow=False) > 1e-3
    n_attending = sum(kind.attends for kind in layer_kinds(model))
    assert rollout.evicted_at.shape[1] == n_attending
    assert (table_rows(model) is None) == (n_attending == len(layer_kinds(model)))


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_the_models_own_forward(name):
    own, ours = hybrid(name), prepare_backbone(hybrid(name))
    rollout = sampled(ours, "dense")
    expected, found = own_logps(own, rollout), replay_logps(ours, rollout)[:, 1:]
    assert (expected - found).abs().max() < 1e-4
    expected.sum().backward()
    found.sum().backward()
    for (parameter, one), (_, other) in zip(own.named_parameters(), ours.named_parameters(), strict=True):
        if one.grad is not None:
            error = (one.grad - other.grad).abs().max() / one.grad.abs().max().clamp(min=1e-4)
            assert error < 2e-3, parameter


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_does_not_enter_the_state(name):
    model = prepare_backbone(hybrid(name))
    rollout = sampled(model)
    poisoned = rollout.input_ids.masked_fill(~rollout.attention_mask, 9)
    assert not torch.equal(poisoned, rollout.input_ids)
    before, after = (
        replay_logps(model, rollout.map_tensors(lambda value: value)),
        replay_logps(model, type(rollout)(**(vars(rollout) | {"input_ids": poisoned}))),
    )
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_states_are_counted_and_do_not_grow(name):
    model = prepare_backbone(hybrid(name))
    n_attending = sum(kind.attends for kind in layer_kinds(model))
    slots = 2 * len(LENS) * n_attending * 2 * 8 * 11 * 4  # keys and values of 8 + 3 slots
    few, many = (roll_out(model, max_new_tokens=n).kv_bytes for n in (12, 20))
    assert few == many > slots


@pytest.mark.parametrize("name", CONFIGS)
def test_loading_catches_a_state_that_is_dropped(name, monkeypatch):
    own = state_layer.StateLayer.end_feed

    def dropped(layer, incoming):
        own(layer, incoming)
        for states in (layer.conv_states, layer.recurrent_states):
            for state in states.values():
                if state is not None:
                    state.zero_()

    monkeypatch.setattr(state_layer.StateLayer, "end_feed", dropped)
    with pytest.raises(ValueError, match="its logits change when it decodes from our cache"):
        prepare_backbone(hybrid(name))
