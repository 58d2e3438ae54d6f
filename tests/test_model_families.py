"""Checkpoints of many model families, through the config: loaded, rolled out, replayed, updated, exported."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FalconMambaConfig, GenerationConfig

from lit_rlkv.config import ConfigError
from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.tokenizers import decode_completions, end_token_ids
from lit_rlkv.models import replay_logps
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.rollout import generate
from lit_rlkv.runs.policy import load_backbone, make_policy
from lit_rlkv.runs.run import Run
from lit_rlkv.stages.export import export_policy, policy_logits, probe_tokens
from lit_rlkv.trainer import Learner
from lit_rlkv.types import Message
from tests.hand_built import shift
from tests.integrations.test_layer_kinds import MODELS, build
from tests.models_zoo import FAMILIES
from tests.models_zoo import build as build_from
from tests.saved_models import N_TOKENS, change_json, chat_tokenizer, save_checkpoint, save_model
from tests.tiers import short_tier, slow
from tests.whole_runs import config, rows_of, run

LIGHT = ["stages=[rl]", "diagnostics=none", "algorithm.n_iterations=1", "roles.rank=4"]


def opened(folder, checkpoint, *overrides):
    """The parts of a run on a checkpoint, and its policy."""
    parts = Run(config(folder, *LIGHT, f"model.path={checkpoint}", *overrides))
    return parts, make_policy(parts, checkpoint)


def metrics_of(folder, name, checkpoint, *overrides):
    """The only row of a run of one iteration."""
    run(folder, name, *LIGHT, f"model.path={checkpoint}", *overrides)
    (row,) = rows_of(folder / name)
    return {key: float(value) for key, value in row.items() if value}


@pytest.mark.parametrize("family", short_tier(FAMILIES, ["gpt2", "gemma2"]))
def test_a_checkpoint_of_every_family_is_rolled_out_replayed_and_updated(family, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", family)
    found = metrics_of(tmp_path, "run", checkpoint, "algorithm.kl.weight=0.1")
    assert found["kv/replay_gap"] < 1e-4
    assert found["grad_norm"] > 0


@pytest.mark.parametrize("name", short_tier(MODELS, ["qwen3_5"]))
def test_layers_of_other_kinds_train_and_are_exported(name, tmp_path):
    checkpoint = save_model(tmp_path / "model", build(name))
    found = metrics_of(tmp_path, "run", checkpoint, "algorithm.kl.weight=0.1")
    assert found["kv/replay_gap"] < 1e-4
    assert found["grad_norm"] > 0
    parts, module = opened(tmp_path, checkpoint, "algorithm=ppo", "roles.gradient_checkpointing=true")
    shift(module.roles)
    out = exported(parts, module, checkpoint, tmp_path)[0]
    merged = AutoModelForCausalLM.from_pretrained(out)
    input_ids = probe_tokens(merged)
    with torch.no_grad():
        expected = policy_logits(module.roles, input_ids)
        torch.testing.assert_close(merged(input_ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", slow("gemma2")])
def test_recomputed_layers_give_the_same_update(family, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", family)
    plain = metrics_of(tmp_path, "plain", checkpoint, "algorithm=ppo")
    again = metrics_of(tmp_path, "again", checkpoint, "algorithm=ppo", "roles.gradient_checkpointing=true")
    for name in ("loss", "grad_norm", "kv/replay_gap"):
        assert again[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("llama", False), ("gpt2", True), slow("phi3", False), slow("gemma2", True), slow("gpt_neox", False)],
)
def test_an_export_computes_the_policy_in_plain_transformers(family, is_tied, tmp_path):
    # gpt2 swaps rows and columns, phi3 has projections in one matrix; where tied, the head is the embedding.
    checkpoint = save_checkpoint(tmp_path / "model", family, tie_word_embeddings=is_tied, ends=[1, 50])
    parts, module = opened(tmp_path, checkpoint)
    shift(module.roles)
    out = exported(parts, module, checkpoint, tmp_path)[0]
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == is_tied
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 50]
    input_ids = probe_tokens(merged)
    expected = policy_logits(module.roles, input_ids)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(checkpoint)(input_ids).logits
        torch.testing.assert_close(merged(input_ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert float((base - expected).abs().max()) > 1e-2 * float(expected.abs().max())


def test_an_adapter_on_a_shared_embedding_is_refused_before_training(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"roles.*embed_tokens"):
        opened(tmp_path, checkpoint, "roles.target_modules=[embed_tokens]")


def exported(parts, module, checkpoint, folder):
    out = folder / "out"
    out.mkdir()
    found = export_policy(module.roles, parts.tokenizer, checkpoint, out, dtype=None, with_heads=False)
    return out, found


@pytest.mark.parametrize("name", short_tier(["llama", *MODELS], ["llama", "qwen3_5"]))
def test_in_bfloat16_replay_is_exact_to_that_precision(name, tmp_path):
    folder = tmp_path / "model"
    checkpoint = save_checkpoint(folder) if name == "llama" else save_model(folder, build(name))
    half = "fabric.precision=bf16-true"
    found = metrics_of(tmp_path, "half", checkpoint, half)
    floor = metrics_of(tmp_path, "full", checkpoint, half, "cache.policy=dense", "distillation=none")
    # What rounding makes of log-probs where nothing was evicted; a key too many moves them by more than 1.
    assert 1e-4 < found["kv/replay_gap"] < 4 * floor["kv/replay_gap"]
    parts, module = opened(tmp_path, checkpoint, "fabric.precision=bf16-true")
    assert exported(parts, module, checkpoint, tmp_path)[1].dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_in_bfloat16_all_that_trains_beside_the_backbone_stays_in_float32(algorithm, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    options = ["fabric.precision=bf16-true", f"algorithm={algorithm}"]
    parts, module = opened(tmp_path, checkpoint, *options)
    rotary = module.roles.backbone("policy").model.rotary_emb.inv_freq.clone()
    Learner(parts.fabric, module, [], 1.0, None)
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert torch.equal(module.roles.backbone("policy").model.rotary_emb.inv_freq, rotary)
    with parts.fabric.autocast():
        assert torch.tensor([0.1]).dtype == torch.float32  # of rewards, which come as Python's numbers
    metrics_of(tmp_path, "trained", checkpoint, *options, "optimizer.lr=1e-5")
    saved = load_file(next((tmp_path / "trained").glob("checkpoints/iteration-*/trainable.safetensors")))
    assert {value.dtype for value in saved.values()} == {torch.float32}


def rolled_out(parts, module, prompts, **options):
    batch = encode_prompts(parts.tokenizer, prompts)
    with acting_as(module.roles, "policy") as backbone:
        return generate(
            backbone, batch.input_ids, batch.attention_mask, cache=parts.cfg.parts.cache, max_new_tokens=16,
            pad_token_id=parts.tokenizer.pad_token_id, generator=torch.Generator().manual_seed(0),
            **{"eos_token_id": end_token_ids(parts.tokenizer), "num_return_sequences": 64} | options,
        )  # fmt: skip


def test_a_response_ends_at_each_of_the_ends_that_the_checkpoint_lists(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", tokenizer=chat_tokenizer(), ends=[1, N_TOKENS])
    parts, module = opened(tmp_path, checkpoint)
    assert end_token_ids(parts.tokenizer) == [1, N_TOKENS]
    rollout = rolled_out(parts, module, ["1+2="])
    ended = rollout.response_mask.sum(dim=1) < 16
    last = [int(row[mine][-1]) for row, mine in zip(rollout.input_ids, rollout.response_mask, strict=True)]
    assert {last[i] for i in ended.nonzero().flatten()} == {1, N_TOKENS}
    inner = [row[mine][:-1] for row, mine in zip(rollout.input_ids, rollout.response_mask, strict=True)]
    assert not any(int(token) in (1, N_TOKENS) for row in inner for token in row)
    texts = decode_completions(parts.tokenizer, rollout.input_ids, rollout.response_mask)
    assert not any("<turn>" in text or "<eos>" in text for text in texts)
    # an end that is not listed is a token like others
    unlisted = rolled_out(parts, module, ["1+2="], eos_token_id=1)
    texts = decode_completions(parts.tokenizer, unlisted.input_ids, unlisted.response_mask)
    assert any("<turn>" in text for text in texts)


def test_an_end_that_the_tokenizer_writes_as_text_is_a_default_and_no_end(tmp_path):
    # Llama's class has 2 for its end, which here is the digit 0.
    checkpoint = save_checkpoint(tmp_path / "model", ends=[1, 2])
    assert end_token_ids(Run(config(tmp_path, f"model.path={checkpoint}", *LIGHT)).tokenizer) == [1]


def test_a_chat_goes_through_the_template_of_the_checkpoint_and_padding_is_its_end(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", tokenizer=chat_tokenizer())
    parts, module = opened(tmp_path, checkpoint)
    assert parts.tokenizer.pad_token_id == parts.tokenizer.eos_token_id == 1
    chat = (Message("system", "add"), Message("user", "1+2="))
    batch = encode_prompts(parts.tokenizer, [chat, "7"])
    texts = [
        parts.tokenizer.decode(row[attention_mask])
        for row, attention_mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    assert texts == ["add\n1+2=\na:", "7\na:"]
    rollout = rolled_out(parts, module, [chat, "7"], num_return_sequences=4)
    with acting_as(module.roles, "policy") as backbone, torch.no_grad():
        replayed = replay_logps(backbone, rollout)
    assert float((replayed - rollout.rollout_logps).abs().max()) < 1e-4


def test_a_chat_without_a_template_is_refused_before_work(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    parts, _ = opened(tmp_path, checkpoint)
    with pytest.raises(ValueError, match="the tokenizer has no chat template to write the chat"):
        encode_prompts(parts.tokenizer, [(Message("user", "1+2="),)])


def test_ids_of_a_padded_vocabulary_are_seen_and_not_dropped(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")  # 64 embeddings, 51 tokens
    parts, module = opened(tmp_path, checkpoint)
    rollout = rolled_out(parts, module, ["1+2="])
    texts = decode_completions(parts.tokenizer, rollout.input_ids, rollout.response_mask)
    padded = [
        ((row >= N_TOKENS) & is_mine).any()
        for row, is_mine in zip(rollout.input_ids, rollout.response_mask, strict=True)
    ]
    assert any(padded)
    assert [f"<|{N_TOKENS}" in text or "<|5" in text or "<|6" in text for text in texts] == padded
    # learner and sampler share one distribution, over all 64
    with acting_as(module.roles, "policy") as backbone, torch.no_grad():
        replayed = replay_logps(backbone, rollout)
    assert float((replayed - rollout.rollout_logps).abs().max()) < 1e-4


def loaded(folder, checkpoint, *overrides):
    load_backbone(Run(config(folder, *LIGHT, f"model.path={checkpoint}", *overrides)), checkpoint)


def refusal(folder, checkpoint, *overrides):
    with pytest.raises(ConfigError) as error:
        loaded(folder, checkpoint, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        (
            "llama",
            {"max_position_embeddings": 12},
            "has positions for 12; lower rollout.max_new_tokens or shorten the prompts",
        ),
    ],
)
def test_a_checkpoint_that_is_too_short_is_refused(family, changes, says, tmp_path):
    assert says in refusal(tmp_path, save_checkpoint(tmp_path / "model", family, **changes))


def test_a_checkpoint_that_cannot_be_replayed_is_refused_with_the_reason(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    mamba = FalconMambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    build_from(mamba).save_pretrained(checkpoint)
    assert "has no layer with attention" in refusal(tmp_path, checkpoint)


def test_pickles_and_foreign_code_are_refused(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    change_json(checkpoint / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    assert "which is never run" in refusal(tmp_path, checkpoint)
    change_json(checkpoint / "config.json", model_type="llama", auto_map={})
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "convert it once" in refusal(tmp_path, checkpoint)


def test_a_pad_token_without_an_embedding_is_refused(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([f"<x{i}>" for i in range(20)])
    tokenizer.pad_token = "<x19>"
    checkpoint = save_checkpoint(tmp_path / "model", tokenizer=tokenizer, pad_token_id=0)
    assert "<x19> (71), <x12> (64), <x13> (65) and 5 more are beyond the 64 tokens" in refusal(
        tmp_path, checkpoint
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "quantization=4bit needs CUDA, got device cpu"),
        (["stages=[sft,rl]"], "but sft trains all weights"),
        (["roles=ppo"], "roles.layout=ppo) trains all weights"),
        (["fabric.quantization=3bit"], "fabric.quantization must be 4bit or null, got 3bit"),
        (["model.path=null"], "is of a checkpoint; give model.path"),
    ],
)
def test_a_quantized_backbone_is_refused_where_it_cannot_be(overrides, says, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    assert says in refusal(tmp_path, checkpoint, "fabric.quantization=4bit", *overrides)
