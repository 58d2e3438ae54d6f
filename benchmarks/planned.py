"""What a budget buys on a card, planned: responses at a time with all keys, 2,048 and 1,024 of them.

    python benchmarks/planned.py [--gpu 24GB] [--tokens 4096 16384 32768] [--models qwen3-4b ...]

Printed are the responses that the card decodes at a time, in groups of 8 after prompts of 512 tokens, and the
longest sequence that its learner takes: LoRA of rank 32 on bfloat16 weights. It is `python -m lit_rlkv.plan`
for shapes of public models, without their files, and measures nothing.
"""

import tempfile
from dataclasses import replace

import command_line
from text_table import text_table
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from lit_rlkv.cli import compose_arguments
from lit_rlkv.config import Config, parse_config
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.planning.cards import Card, find_card
from lit_rlkv.planning.models import roles_of
from lit_rlkv.planning.plan import Planner

QWEN3 = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3-1.7b": Qwen3Config(
        **QWEN3 | {"num_attention_heads": 16},
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": Qwen3Config(
        **QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, tie_word_embeddings=True
    ),
    "qwen3-8b": Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, tie_word_embeddings=False
    ),
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "gemma-3-4b": Gemma3TextConfig(
        vocab_size=262_208,
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)],
    ),
}
"""Shapes of public models."""
SETTINGS = [
    *("recipe=llm", "cache.policy=h2o", "cache.budget=1024", "cache.interval=128", "cache.sink=4"),
    *("cache.window=16", "rollout.n_prompts=64", "algorithm.group_size=8"),
]


def config_of(settings: list[str]) -> Config:
    """Return the config of settings of fit."""
    return parse_config(compose_arguments("config", settings)[0])


def cells(name: str, card: Card, lengths: list[int], *, is_packed: bool) -> list[str]:
    """Return a row of the table: responses at a time by length, and the longest sequence that learns."""
    with tempfile.TemporaryDirectory() as folder:
        MODELS[name].save_pretrained(folder)
        quantized = ["fabric.quantization=4bit"] if is_packed else []
        cfg = config_of([*SETTINGS, *quantized, f"model.path={folder}"])
        roles = roles_of(cfg)
    count = PassBytes(roles.backbone("policy"), is_fused=True)
    found = [f"{name}, 4 bit" if is_packed else name]
    for n_tokens in lengths:
        asked = replace(cfg, rollout=replace(cfg.rollout, max_new_tokens=n_tokens))
        planner = Planner(asked, roles, count, card, n_prompt=512)
        rows = [planner.row(cache) for cache in planner.caches()][:3]
        learns = "" if rows[-1].tokens_per_pass else " †"
        found.append(" → ".join(str(row.n_rows or "–") for row in rows) + learns)
    return [*found, f"{planner.longest():,}"]


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--gpu", default="24GB", help="a card or its memory")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384, 32_768])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    args = parser.parse_args()
    card = find_card(args.gpu)
    cases = [(name, packed) for name in args.models for packed in (False, True) if not packed or "8b" in name]
    rows = [cells(name, card, args.tokens, is_packed=packed) for name, packed in cases]
    print(text_table(["model", *(f"{n:,} tokens" for n in args.tokens), "longest that learns"], rows))
    print("† the learner cannot take such a sequence on this card")


if __name__ == "__main__":
    main()
