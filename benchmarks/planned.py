"""The gain of a budget on a card, planned: responses at a time with all keys, 2,048 and 1,024 of them.

    python benchmarks/planned.py [--gpu 24GB] [--tokens 1024 4096 16384 32768] [--models qwen3-4b ...]
    python benchmarks/planned.py --recipes                        the recipes of conf/recipe for a card

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
from lit_rlkv.planning.cards import Card, find_card
from lit_rlkv.planning.models import pass_bytes_of, roles_of
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
    count = pass_bytes_of(cfg, roles, card)
    found = [f"{name}, 4 bit" if is_packed else name]
    for n_tokens in lengths:
        asked = replace(cfg, rollout=replace(cfg.rollout, max_new_tokens=n_tokens))
        planner = Planner(asked, roles, count, card, n_prompt=512)
        rows = [planner.row(cache) for cache in planner.caches()][:3]
        learns = "" if rows[-1].tokens_per_pass else " †"
        found.append(" → ".join(str(row.n_rows or "–") for row in rows) + learns)
    return [*found, f"{planner.longest():,}"]


RECIPES = {
    "qwen3-1.7b-24gb": ("qwen3-1.7b", "24GB"),
    "qwen3-4b-24gb": ("qwen3-4b", "24GB"),
    "qwen3-8b-80gb": ("qwen3-8b", "H100"),
    "qwen3-8b-8x80gb": ("qwen3-8b", "H100"),
}
"""Model and card of each recipe."""


def planner_of(recipe: str, folder: str) -> Planner:
    """Return the planner of a recipe, whose model's config is written to a folder."""
    name, gpu = RECIPES[recipe]
    MODELS[name].save_pretrained(folder)
    cfg = config_of([f"recipe={recipe}", f"model.path={folder}"])
    n_ranks = cfg.fabric.devices if isinstance(cfg.fabric.devices, int) else 1
    roles, card = roles_of(cfg), find_card(gpu)
    return Planner(cfg, roles, pass_bytes_of(cfg, roles, card), card, n_prompt=512, n_ranks=n_ranks)


def recipe_cells(recipe: str) -> list[str]:
    """Return card, length, keys, rows, both peaks, tokens/s and hours of 1,000 iterations."""
    with tempfile.TemporaryDirectory() as folder:
        planner = planner_of(recipe, folder)
    row = planner.row(planner.cache)
    assert row.rollout_s is not None
    assert row.update_s is not None
    n_tokens = planner.cfg.rollout.max_new_tokens
    n_sampled = planner.n_responses * planner.n_ranks * n_tokens
    peaks = [f"{sum(parts.values()) / 2**30:.1f}" for parts in (row.rollout, row.update)]
    return [
        recipe,
        f"{planner.n_ranks} × {RECIPES[recipe][1]}" if planner.n_ranks > 1 else RECIPES[recipe][1],
        f"{n_tokens:,}",
        f"{planner.cache.budget:,}",
        f"{row.n_rows} of {planner.n_responses}",
        *peaks,
        f"{n_sampled / row.rollout_s:,.0f}",
        f"{1000 * (row.rollout_s + row.update_s) / 3600:,.0f}",
    ]


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--gpu", default="24GB", help="a card or its memory")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--recipes", action="store_true", help="the recipes for a card")
    args = parser.parse_args()
    if args.recipes:
        heads = ["recipe", "card", "tokens", "keys", "rows", "rollout GiB", "update GiB", "tokens/s", "hours"]
        print(text_table(heads, [recipe_cells(recipe) for recipe in RECIPES]))
        return
    card = find_card(args.gpu)
    cases = [(name, packed) for name in args.models for packed in (False, True) if not packed or "8b" in name]
    rows = [cells(name, card, args.tokens, is_packed=packed) for name, packed in cases]
    print(text_table(["model", *(f"{n:,} tokens" for n in args.tokens), "longest that learns"], rows))
    print("† the learner cannot take such a sequence on this card")


if __name__ == "__main__":
    main()
