"""GGUF files as llama.cpp writes them: a small Llama with a byte-level BPE tokenizer, quantized."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.models_zoo import build

HEADS, KV_HEADS = 9, 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["What is 1+2+3? 1+2=3 3+3=6", "The capital of France is Paris.", "0123456789 abcdefghijklmnop\n"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_llama(n_tokens: int) -> PreTrainedModel:
    """Two layers with the shape of SmolLM2: nine heads, three KV heads, tied embeddings."""
    config = LlamaConfig(
        vocab_size=n_tokens,
        hidden_size=288,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = build(config)
    assert isinstance(model, LlamaForCausalLM)
    return model


def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with the special tokens first, as SmolLM2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def write_gguf(
    file: Path,
    *,
    architecture: str = "llama",
    template: str | None = TEMPLATE,
    kind: str = "Q4_1",
    change: Callable[[GGUFWriter], object] = lambda writer: None,
) -> PreTrainedModel:
    """Write a GGUF file, and return the model whose weights were quantized for it."""
    tokenizer = trained_tokenizer()
    model = small_llama(tokenizer.get_vocab_size())
    writer = GGUFWriter(file, architecture)
    _write_settings(writer, model.config)
    _write_tokenizer(writer, tokenizer, template)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            _write_tensor(writer, name, weight.numpy(), GGMLQuantizationType[kind])
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_settings(writer: GGUFWriter, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, template: str | None) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    control, normal = 3, 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([control if token in SPECIALS else normal for token, _ in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if template is not None:
        writer.add_chat_template(template)


def _write_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, kind: GGMLQuantizationType) -> None:
    place = name.removeprefix("model.").removesuffix(".weight")
    if place.startswith("layers."):
        _, number, part = place.split(".", 2)
        target = f"blk.{number}.{NAMES[part]}"
        if part == "self_attn.q_proj":
            weight = interleaved(weight, HEADS)
        if part == "self_attn.k_proj":
            weight = interleaved(weight, KV_HEADS)
    else:
        target = {"embed_tokens": "token_embd", "norm": "output_norm"}[place]
    if weight.ndim == 1:
        writer.add_tensor(f"{target}.weight", weight.astype(np.float32))
    else:
        writer.add_tensor(f"{target}.weight", quantize(weight, kind), raw_dtype=kind)


def interleaved(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection as llama.cpp rotates them: pairs side by side."""
    halves = weight.reshape(n_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
