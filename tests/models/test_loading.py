"""Checkpoints that must not be loaded, and why; those that must, whatever they ask for."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OPTConfig

from lit_rlkv.data.tokenizers import load_tokenizer
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.loading import friendly_errors, load_causal_lm, without_dropout
from lit_rlkv.models.presets import tiny_qwen3
from tests.models_zoo import build
from tests.saved_models import change_json, save_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path / "model")


def load_both(folder):
    return load_tokenizer(str(folder)), load_causal_lm(folder, torch.float32)


def test_weights_come_in_the_precision_asked_for(checkpoint):
    model = load_causal_lm(checkpoint, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert load_causal_lm(checkpoint, torch.float32).dtype == torch.float32


def test_pickled_weights_are_refused_with_the_way_to_convert_them(checkpoint, tmp_path):
    state = load_causal_lm(checkpoint, torch.float32).state_dict()
    (checkpoint / "model.safetensors").unlink()
    torch.save(state, checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin; pickles.*convert it once") as refusal:
        load_causal_lm(checkpoint, torch.float32)
    assert "\n" not in str(refusal.value)
    # what it advises works
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, use_safetensors=False)
    loaded.save_pretrained(tmp_path / "new")
    assert load_causal_lm(tmp_path / "new", torch.float32).num_parameters() == loaded.num_parameters()


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def wrapped(weights):
    """Leave weights as peft names them under an adapter."""
    weights[Q_PROJ.replace("weight", "base_layer.weight")] = weights.pop(Q_PROJ)


MLP, Q_PROJ = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("lm_head.weight"), r"lacks lm_head\.weight"),
        (lambda w: w.pop(MLP), f"lacks {MLP}"),
        (lambda w: w.update({MLP: torch.zeros(3, 3)}), f"other sizes.*{MLP}"),
        (lambda w: w.update({EMBEDDINGS: torch.zeros(70, 32)}), f"other sizes.*{EMBEDDINGS}"),
        (lambda w: w.update({"v_head.weight": torch.zeros(1, 3)}), r"no place in its model for v_head\.w"),
        (wrapped, f"lacks {Q_PROJ}"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_named(checkpoint, change, says):
    change_weights(checkpoint, change)
    with pytest.raises(ValueError, match=says) as refusal:
        load_causal_lm(checkpoint, torch.float32)
    assert "\n" not in str(refusal.value)


def test_what_transformers_itself_takes_no_notice_of_is_no_mistake(checkpoint, tmp_path):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}  # of an old release
    change_weights(checkpoint, lambda weights: weights.update(frequencies))
    load_causal_lm(checkpoint, torch.float32)
    load_causal_lm(save_checkpoint(tmp_path / "tied", tie_word_embeddings=True), torch.float32)


def test_an_adapter_beside_or_instead_of_the_weights_is_not_lost(checkpoint, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = get_peft_model(plain, LoraConfig(target_modules=["q_proj"]))
    for folder in (checkpoint, tmp_path / "alone"):
        model.save_pretrained(folder)
        with pytest.raises(ValueError, match="merge it first"):
            load_causal_lm(folder, torch.float32)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")  # as it says
    load_causal_lm(tmp_path / "merged", torch.float32)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"{}\n" * 100),
        ("config.json", b'{"model_type": "llama", "hidden_size": "x"}'),
        ("config.json", b'{"model_type": "lla'),
        ("config.json", b"[1]"),
        ("tokenizer.json", b'{"version": "1'),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("generation_config.json", b'{"eos'),
    ],
)
def test_a_damaged_file_is_told_in_one_line_with_its_folder(checkpoint, name, content):
    (checkpoint / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged.*restore it, or fetch the model again") as refusal:
        load_both(checkpoint)
    assert str(checkpoint) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def shard(folder, name, write):
    """Split the weights in two, the second half in a file that `write` makes and the index calls `name`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, second = dict(sorted(weights.items())[:9]), dict(sorted(weights.items())[9:])
    save_file(first, folder / "first.safetensors", metadata={"format": "pt"})
    save_file({"a": torch.zeros(1)}, folder / "beside.safetensors")
    write(second)
    names = dict.fromkeys(first, "first.safetensors") | dict.fromkeys(second, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_an_index_names_regular_safetensors_of_the_folder_alone(checkpoint, tmp_path):
    outside, second = tmp_path / "outside.safetensors", checkpoint / "second.safetensors"

    def saved(file):
        return lambda weights: save_file(weights, file, metadata={"format": "pt"})

    def linked(weights):
        saved(outside)(weights)
        second.symlink_to(outside)

    cases = [
        ("../outside.safetensors", saved(outside), "got '../outside"),
        (str(outside), saved(outside), "got '/"),
        ("m.bin", lambda weights: torch.save(weights, checkpoint / "m.bin"), "got 'm.bin'; pickles"),
        (second.name, lambda weights: torch.save(weights, second), "damaged or not whole"),
        (second.name, lambda _: os.mkfifo(second), "as a regular file"),
        (second.name, lambda _: second.mkdir(), "as a regular file"),
        (second.name, linked, "leads out of the model's folder"),
        (3, lambda _: None, "got 3; pickles"),
    ]
    whole = tmp_path / "whole"
    checkpoint.rename(whole)
    for name, write, says in cases:
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(whole, checkpoint)
        shard(checkpoint, name, write)
        with pytest.raises(ValueError, match=re.escape(says)) as refusal:
            load_causal_lm(checkpoint, torch.float32)
        assert "\n" not in str(refusal.value)
    # the twin: shards of the folder itself, and those of the hub's cache, which are links
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "main", tmp_path / "hub" / "blobs"
    shutil.copytree(whole, snapshot)
    shard(snapshot, second.name, saved(snapshot / second.name))
    load_causal_lm(snapshot, torch.float32)
    blobs.mkdir()
    (snapshot / second.name).rename(blobs / "3f")
    (snapshot / second.name).symlink_to("../../blobs/3f")
    load_causal_lm(snapshot, torch.float32)


def in_config(**values):
    return lambda folder: change_json(folder / "config.json", **values)


def with_a_link_to_elsewhere(folder):
    """An export copies the tokenizer's files, and so what a link leads to."""
    (folder.parent / "secret").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").symlink_to(folder.parent / "secret")


def as_whole_numbers(folder):
    change_weights(folder, lambda weights: weights.update({n: p.to(torch.int8) for n, p in weights.items()}))


OF_ITS_FOLDER = r"must name files \*\.safetensors.* of its own folder.*got"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no weights \(no \*\.safetensors\)"),
        *(
            (in_config(transformers_weights=name), OF_ITS_FOLDER)
            for name in ("../w.safetensors", "/w.safetensors", "adapter_model.bin", 7)
        ),
        (in_config(num_labels=10**9), "num_labels of at most 100,000"),
        (with_a_link_to_elsewhere, r"x\.jinja leads out of the model's folder"),
        (as_whole_numbers, "must have weights of floats"),
    ],
)
def test_a_folder_that_no_model_is_in_is_refused(checkpoint, change, says):
    change(checkpoint)
    with pytest.raises(ValueError, match=says):
        load_causal_lm(checkpoint, torch.float32)


def test_a_tokenizer_names_files_of_its_own_folder(checkpoint):
    change_json(checkpoint / "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.json"])
    with pytest.raises(ValueError, match=r"must name files \*\.json of its own folder"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 10**12),
        ("vocab_size", 10**30),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**14),
        ("head_dim", 10**10),
        ("num_hidden_layers", 5_000),
        ("num_hidden_layers", 30_000),
        ("num_hidden_layers", 10**12),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_absurd_sizes_are_told_before_memory_is_asked_for(tmp_path, family, name, value):
    folder = save_checkpoint(tmp_path / "model", family)
    change_json(folder / "config.json", **{name: value})
    with pytest.raises(ValueError, match=re.escape(str(folder))) as refusal:
        load_both(folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_a_model_that_memory_does_not_hold_is_not_taken_for_a_damaged_one(checkpoint):
    with pytest.raises(MemoryError), friendly_errors(checkpoint):
        raise MemoryError


def test_code_of_a_checkpoint_is_never_run(checkpoint, tmp_path):
    ran = tmp_path / "ran"
    (checkpoint / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    change_json(checkpoint / "config.json", model_type="mine", auto_map=classes)
    with pytest.raises(ValueError, match=r"needs remote code \(model_type mine\), which is never run"):
        load_causal_lm(checkpoint, torch.float32)
    assert not ran.exists()


def test_known_families_use_the_code_of_transformers(checkpoint, tmp_path):
    (checkpoint / "mine.py").write_text("raise SystemExit\n")
    change_json(checkpoint / "config.json", auto_map={"AutoModelForCausalLM": "mine.Model"})
    model = load_causal_lm(checkpoint, torch.float32)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"


def test_the_attention_that_a_checkpoint_asks_for_does_not_matter(checkpoint):
    expected = load_causal_lm(checkpoint, torch.float32)
    change_json(checkpoint / "config.json", attn_implementation="flash_attention_2")
    with pytest.raises(ImportError, match="FlashAttention2"):
        AutoModelForCausalLM.from_pretrained(checkpoint)
    model = prepare_backbone(load_causal_lm(checkpoint, torch.float32))
    input_ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, expected(input_ids).logits)


def test_randomness_that_only_the_config_can_switch_off_is_switched_off():
    # OPT drops by function at the rate in its config, which no walk over modules finds.
    settings = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32, "dropout": 0.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"set any dropout that is not an nn\.Dropout to 0 in its config"):
        prepare_backbone(build(OPTConfig(**settings)))
    prepare_backbone(build(without_dropout(OPTConfig(**settings))))


@pytest.mark.parametrize(
    ("quantization", "device", "says"),
    [
        ("4bit", "cpu", "quantization=4bit needs CUDA, got device cpu; use null"),
        ("3bit", "cuda", "quantization='3bit' is unknown; choose 4bit or null"),
    ],
)
def test_a_quantization_that_cannot_be_had_is_refused(checkpoint, quantization, device, says):
    with pytest.raises(ValueError, match=says):
        load_causal_lm(checkpoint, torch.float32, quantization=quantization, device=torch.device(device))


def test_without_bitsandbytes_its_extra_is_named(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r'needs bitsandbytes; pip install -e "\.\[quant\]"'):
        load_causal_lm(checkpoint, torch.float32, quantization="4bit", device=torch.device("cuda"))


def test_a_preset_without_size_is_refused():
    with pytest.raises(ValueError, match=r"preset\.hidden_size must be a whole number of at least 1, got 0"):
        tiny_qwen3(64, 0, 1, hidden_size=0)
