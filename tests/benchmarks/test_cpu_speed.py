"""Speed beside the libraries: both sides do the same work on a tiny model."""

import cpu_speed
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rlkv import prepare_backbone

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    monkeypatch.setattr(cpu_speed, "N_SHORT", 8)
    monkeypatch.setattr(
        cpu_speed, "DECODES", {"short": [(2, 8, cpu_speed.DENSE), (2, 8, cpu_speed.EVICTING)]}
    )
    return str(tmp_path)


def test_both_sides_write_as_many_tokens(path):
    model = prepare_backbone(cpu_speed.load(path))
    prompts = cpu_speed.random_prompts(model, 2)
    rollout = cpu_speed.sample(model, prompts, cpu_speed.EVICTING, 8)
    assert rollout.response_mask.sum() == 2 * 8
    theirs = cpu_speed.load(path)
    lengths = []
    generate = theirs.generate
    theirs.generate = lambda *args, **settings: lengths.append(generate(*args, **settings).shape[1])
    cpu_speed.sample_theirs(theirs, prompts, 8)
    assert lengths == [cpu_speed.N_PROMPT + 8]


def test_rows_tell_the_ratio_of_times_measured_in_turn(path):
    rows = cpu_speed.decode_rows(path, ["short"], n_rounds=3)
    assert [row["what"] for row in rows] == ["decode 2 × 8, all keys", "decode 2 × 8, h2o 64+16"]
    for row in [*rows, cpu_speed.update_row(path, n_rounds=3)]:
        ratios = sorted(theirs / ours for ours, theirs in row["seconds"])
        assert row["ratio"] == pytest.approx(ratios[1], rel=0.2)  # seconds are rounded
        assert row["ours_tokens_per_second"] > 0
