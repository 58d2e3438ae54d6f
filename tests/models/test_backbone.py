from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma4TextConfig,
    GPT2Config,
    GraniteConfig,
    PretrainedConfig,
)

from lit_rlkv.diagnostics.flops import flop_costs
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.backbone import (
    can_be_captured,
    check_length,
    head_dims,
    head_logits,
    layer_kinds,
    token_positions,
)
from tests.models_zoo import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    SIZE,
    VOCAB,
    build,
    ragged_prompts,
    tiny_config,
    tiny_model,
)
from tests.rollouts import TOLERANCE, gap, roll_out


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SIZE, logits_scaling=4.0, attention_multiplier=0.3, residual_multiplier=0.7),
        CohereConfig(**SIZE, logit_scale=0.25),
        tiny_config("gemma3", final_logit_softcapping=5.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_scalings_behind_the_output_head_are_applied(config: PretrainedConfig):
    model = prepare_backbone(build(config))
    input_ids = ragged_prompts()[0]
    hidden = model.base_model(input_ids).last_hidden_state
    torch.testing.assert_close(head_logits(model, hidden), model(input_ids).logits)
    assert not torch.allclose(model.get_output_embeddings()(hidden), model(input_ids).logits, atol=1e-2)
    assert gap(model, roll_out(model, max_new_tokens=8)) < TOLERANCE


def test_windows_are_those_of_the_layers_that_slide():
    def windows(family, **changes):
        return [kind.window for kind in layer_kinds(build(tiny_config(family, **changes)))]

    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows("mistral", sliding_window=16) == [16] * 3
    assert windows("gemma3", sliding_window=16, layer_types=layer_types) == [16, None, None]
    assert windows("qwen2", use_sliding_window=False, sliding_window=16) == [None] * 3
    assert windows("llama") == [None] * 3


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("llama", max_position_embeddings=32),
        GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=HEADS, n_positions=32),
    ],
    ids=["under its usual name", "under GPT-2's name"],
)
def test_sequences_longer_than_the_positions_are_refused(config: PretrainedConfig):
    model = prepare_backbone(build(config))
    check_length(model, 32)
    with pytest.raises(
        ValueError, match=r"a sequence may reach 33 tokens, but .* has positions for 32; shorten the texts"
    ):
        check_length(model, 33)
    with pytest.raises(ValueError, match="for 32; read less"):
        check_length(model, 33, "read less")


def test_sequences_on_which_longrope_turns_all_keys_are_refused():
    # Beyond 16 tokens Phi-3 takes other frequencies for every position, but the cache holds rotated keys.
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = tiny_config("phi3", original_max_position_embeddings=16, rope_parameters=rope)
    model = prepare_backbone(build(config))
    check_length(model, 16)
    with pytest.raises(ValueError, match="beyond 16 Phi3ForCausalLM rotates all its keys differently"):
        check_length(model, 17)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    ],
)
def test_a_model_whose_rotation_asks_for_the_length_is_not_captured(scaling: dict[str, Any]):
    rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 64, **scaling}
    assert not can_be_captured(build(tiny_config("llama", rope_parameters=rope)))
    assert can_be_captured(build(tiny_config("llama")))


def test_positions_count_tokens_and_not_padding():
    attention_mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert token_positions(attention_mask)[attention_mask].tolist() == [0, 1, 2, 0, 1, 2]


def test_generate_and_replay_check_the_length():
    short = prepare_backbone(build(tiny_config("llama", max_position_embeddings=20)))
    with pytest.raises(ValueError, match="has positions for 20"):
        roll_out(short, "dense", max_new_tokens=7)
    rollout = roll_out(cache="dense", max_new_tokens=7)
    with pytest.raises(ValueError, match="has positions for 20"):
        replay_logps(short, rollout)


def test_a_model_that_was_not_prepared_is_refused_rather_than_run_without_a_mask():
    raw = build(tiny_config("llama"))
    message = r"LlamaForCausalLM uses 'sdpa' attention, .*pass the model through prepare_backbone first"
    with pytest.raises(ValueError, match=message):
        roll_out(raw, "dense")
    rollout = roll_out(cache="dense")
    with pytest.raises(ValueError, match=message):
        replay_logps(raw, rollout)


def test_heads_of_layers_may_differ_in_width():
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(num_hidden_layers=2, layer_types=kinds, head_dim=8, global_head_dim=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert head_dims(model) == {8, 16}
    assert flop_costs(model) is None
    assert head_dims(tiny_model("llama")) == {HEAD_DIM}
