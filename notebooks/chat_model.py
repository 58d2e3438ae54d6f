"""SmolLM2 for the notebooks, and the small random model that stands in for it where they are tested."""

from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lit_rlkv import prepare_backbone
from lit_rlkv.data.tokenizers import load_tokenizer
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.models.loading import load_causal_lm

GGUF = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
START, END = "<|im_start|>", "<|im_end|>"
"""Marks of the start and the end of a turn in the chat template."""


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the model in float32, ready to evict and to replay, and its tokenizer.

    Raises:
        FileNotFoundError: the model has not been fetched yet.
    """
    if not GGUF.is_file():
        raise FileNotFoundError(f"{GGUF} is not there; fetch it: python scripts/fetch_model.py")
    with TemporaryDirectory() as folder, redirect_stderr(StringIO()):  # hides progress bars
        path = converted_gguf(GGUF, Path(folder))
        return prepare_backbone(load_causal_lm(path, torch.float32).eval()), load_tokenizer(str(path))


def make_random(texts: Sequence[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a random Llama of two layers and three KV heads, and a tokenizer trained on the texts."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END, START], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, attn_implementation="eager")
    return prepare_backbone(LlamaForCausalLM(config).eval()), tokenizer
