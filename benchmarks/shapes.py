"""Shapes of published models that several benchmarks build with random weights."""

QWEN_1_5B = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
}
"""Qwen2.5-1.5B."""
