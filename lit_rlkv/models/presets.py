"""Small randomly initialized models, for laptops and tests."""

from typing import Any

from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lit_rlkv.checks import Range


def tiny_qwen3(
    vocab_size: int,
    pad_token_id: int,
    eos_token_id: int,
    hidden_size: int = 128,
    num_hidden_layers: int = 3,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 4,
    head_dim: int = 32,
    intermediate_size: int = 384,
    max_position_embeddings: int = 1024,
) -> PreTrainedModel:
    """Return a Qwen3 of about 0.6M parameters: RMSNorm, RoPE, grouped queries, tied embeddings.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
    }
    for name, size in sizes.items():
        Range(least=1).check(f"preset.{name}", size, int)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            pad_token_id=pad_token_id,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            **sizes,
            tie_word_embeddings=True,
        )
    )
