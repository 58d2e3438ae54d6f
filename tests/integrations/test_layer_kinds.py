"""Layers with states, windows, chunks or sinks, inside transformers' `generate` and TRL's trainers."""

import pytest
import torch

from lit_rlkv.integrations.transformers import generate
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from tests.models.test_attention_sinks import gpt_oss
from tests.models.test_hybrids import hybrid
from tests.models.test_sliding_windows import windowed
from tests.models_zoo import PAD, ragged_prompts
from tests.saved_models import save_model
from tests.tiers import short_tier

MODELS = {
    **{name: (hybrid, name) for name in ("qwen3_5", "qwen3_next", "lfm2", "falcon_h1", "nemotron_h")},
    **{name: (windowed, name) for name in ("gemma3", "mistral", "llama4", "mimo_v2_flash")},
    "gpt_oss": (gpt_oss,),
}
"""The function that builds each of them, and what it is given."""


def build(name):
    make, *given = MODELS[name]
    return make(*given)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_without_evictions_is_that_of_transformers(name):
    input_ids, mask = ragged_prompts()
    prompts = {"input_ids": input_ids, "attention_mask": mask.long()}
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    expected = build(name).generate(**prompts, **options)
    model = prepare_backbone(build(name))

    def found(cache):
        return model.generate(**prompts, custom_generate=generate, cache=cache, **options)

    assert torch.equal(found(CacheSpec.dense()), expected)
    assert torch.equal(found(CacheSpec("snapkv", budget=64)), expected)
    evicts = name != "mistral"  # whose layers all have a window
    assert torch.equal(found(CacheSpec("snapkv", budget=5, interval=2, sink=1, window=1)), expected) != evicts


# TRL's own forward finds no backbone in Llama 4.
@pytest.mark.parametrize(
    "name", short_tier([n for n in MODELS if n != "llama4"], ["qwen3_5", "gemma3", "gpt_oss"])
)
def test_trl_trains_it_under_exact_replay(name, tmp_path):
    pytest.importorskip("trl")
    from tests.integrations.trl_runs import train

    folder = save_model(tmp_path / "model", build(name))
    _, rows = train(str(folder), tmp_path, beta=0.1, max_steps=2)
    assert max(row["kv/replay_gap"] for row in rows if "kv/replay_gap" in row) < 1e-4
    assert all(row["grad_norm"] > 0 for row in rows)
