"""gpt-oss: attention sinks, sliding windows and experts under an evicting cache."""

import pytest
import torch
from transformers import GptOssConfig

from lit_rlkv.models import attention, prepare_backbone
from tests.models_zoo import SIZE, build
from tests.rollouts import TOLERANCE, gap, roll_out, spec_of


def gpt_oss():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
    model = build(GptOssConfig(**SIZE, **sizes, max_position_embeddings=128, eos_token_id=None))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 3, 4))
    return model


@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv", "tova"])
def test_replay_is_exact(policy):
    model = prepare_backbone(gpt_oss())
    rollout = roll_out(model, spec_of(policy, window=2), max_new_tokens=20, record_routing=True)
    assert gap(model, rollout) < TOLERANCE


def test_loading_catches_a_sink_that_is_left_out(monkeypatch):
    own = attention.shadow_attention
    monkeypatch.setattr(attention, "shadow_attention", lambda *args, sink, **options: own(*args, **options))
    with pytest.raises(ValueError, match="cannot be replayed"):
        prepare_backbone(gpt_oss())
