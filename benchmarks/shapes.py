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
QWEN_0_5B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}
"""Qwen2.5-0.5B."""
QWEN_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 9728,
}
"""Qwen3-4B, whose heads have 128 dimensions."""
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
"""SmolLM2-135M."""
