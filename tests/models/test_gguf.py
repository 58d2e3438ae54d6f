"""GGUF files become plain checkpoints with the same weights, tokenizer, template and end tokens."""

import json
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from lit_rlkv.data.chat import encode_prompt
from lit_rlkv.data.tokenizers import end_token_ids, load_tokenizer
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.models.loading import load_causal_lm
from tests.gguf_files import write_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = write_gguf(folder / "small.gguf")
    return model, converted_gguf(folder / "small.gguf", folder / "converted")


def test_weights_are_those_of_the_file_to_the_last_bit(converted):
    model, folder = converted
    kind = GGMLQuantizationType.Q4_1
    found = load_causal_lm(folder, torch.float32).state_dict()
    assert found.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        # Blocks of 32 lie within a row, so the order of rows does not matter to the quantization.
        rounded = (
            weight if weight.ndim == 1 else torch.tensor(dequantize(quantize(weight.numpy(), kind), kind))
        )
        assert torch.equal(found[name], rounded), name
    # the twin: 4 bits do change the weights
    assert not torch.equal(found["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_tokenizer_template_and_all_end_tokens_come_along(converted):
    tokenizer = load_tokenizer(str(converted[1]))
    text = "What is 1+2?"
    assert tokenizer.decode(encode_prompt(tokenizer, text)) == (
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert end_token_ids(tokenizer) == [2, 0]
    assert tokenizer.pad_token_id == 2


def test_the_folder_is_a_plain_checkpoint_and_is_made_once(converted):
    folder = converted[1]
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    file = folder.parent.parent / "small.gguf"
    assert converted_gguf(file, folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_at


def test_another_file_of_the_same_name_is_converted_anew(tmp_path):
    file = tmp_path / "small.gguf"
    folders = []
    for kind in ("Q8_0", "F16"):
        file.unlink(missing_ok=True)
        write_gguf(file, kind=kind)
        folders.append(converted_gguf(file, tmp_path / "converted"))
    assert folders[0] != folders[1]


def test_a_file_without_a_template_refuses_chats_only(tmp_path):
    write_gguf(tmp_path / "small.gguf", template=None)
    tokenizer = load_tokenizer(str(converted_gguf(tmp_path / "small.gguf", tmp_path)))
    assert tokenizer.decode(encode_prompt(tokenizer, "1+2")) == "1+2"


def renamed(old, new):
    return lambda writer: writer.tensors[0].update({new: writer.tensors[0].pop(old)})


def field(name, value):
    def change(writer):
        writer.kv_data[0].pop(name) if value is None else setattr(writer.kv_data[0][name], "value", value)

    return change


Q_PROJ, ZEROS = "blk.0.attn_q.weight", np.zeros(288, np.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architecture": "plamo2"}, r"small\.gguf cannot be converted.*plamo2.*give a checkpoint"),
        ({}, "must be a whole GGUF file"),  # of which the end is missing
        (renamed(Q_PROJ, "blk.9.attn_q.weight"), r"lacks model\.layers\.0\.self_attn\.q_proj\.weight"),
        (renamed("output_norm.weight", "norm.weight"), r"lacks model\.norm\.weight"),
        (lambda writer: writer.tensors[0].pop(Q_PROJ), "lacks model"),
        (lambda writer: writer.add_tensor("extra.weight", ZEROS), r"no place in its model for extra\.weight"),
        (
            lambda writer: writer.add_tensor("blk.0.attn_q.bias", ZEROS),
            r"no place in its model for blk\.0\.at",
        ),
        (
            lambda writer: writer.add_tensor("blk.2.attn_norm.weight", ZEROS),
            r"no place in its model for blk\.2",
        ),
        (field("llama.block_count", None), "has a config of a model with"),
        (field("llama.block_count", 1), r"no place in its model for blk\.1"),
        (field("llama.block_count", 2**31), "llama.block_count of at most 1,000, got 2147483648"),
        (field("llama.attention.head_count", 0), "cannot be converted"),
        (field("llama.attention.head_count", None), "has other sizes than its config"),
        (field("llama.embedding_length", 2**30), "cannot be converted"),
        (field("llama.vocab_size", 2**31), "has a config of a model with"),
        (field("tokenizer.ggml.eos_token_id", 2**31), "cannot be converted"),
        (field("tokenizer.ggml.merges", ["zzz qqq"]), "Token `zzz` out of vocabulary"),
    ],
)
def test_a_file_that_is_not_whole_or_absurd_is_refused_in_one_line(tmp_path, change, says):
    file = tmp_path / "small.gguf"
    write_gguf(file, **change if isinstance(change, dict) else {"change": change})
    if change == {}:
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=says) as error:
        converted_gguf(file, tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_a_list_longer_than_the_file_ends_at_once(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file)
    data, key = file.read_bytes(), b"tokenizer.ggml.token_type"
    place = data.index(key) + len(key) + 8  # after the types of the value and of its items
    file.write_bytes(data[:place] + struct.pack("<Q", 2**40) + data[place + 8 : place + 4096])
    with pytest.raises(ValueError, match="must be a whole GGUF file"):
        converted_gguf(file, tmp_path)
