"""Plans of public models beside an independent calculation from their shapes alone."""

from dataclasses import dataclass

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from lit_rlkv import plan
from lit_rlkv.planning.cards import find_card
from lit_rlkv.planning.models import pass_bytes_of, roles_of
from lit_rlkv.planning.plan import Planner
from tests.tiers import short_tier

RANK, PROMPT, NEW, BUDGET, INTERVAL, ROWS, GROUP = 32, 512, 16_384, 1024, 128, 32, 8


@dataclass(frozen=True)
class Shape:
    """Sizes from a config.json: layers, hidden size, query and KV heads, their width, MLP, vocabulary."""

    layers: int
    d: int
    heads: int
    kv: int
    hd: int
    f: int
    vocab: int
    is_tied: bool
    norms_heads: bool = True
    norms: int = 2
    window: int | None = None
    every: int = 1
    """Each so-manieth layer has no window."""

    @property
    def common(self):
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.d,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "head_dim": self.hd,
            "intermediate_size": self.f,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 131_072,
        }

    @property
    def linears(self):
        q, k, d, f = self.heads * self.hd, self.kv * self.hd, self.d, self.f
        return [(d, q), (d, k), (d, k), (q, d), (d, f), (d, f), (f, d)]

    @property
    def n_weights(self):
        matrices = sum(a * b for a, b in self.linears)
        return self.vocab * self.d * (2 - self.is_tied) + self.layers * matrices

    @property
    def n_adapter(self):
        return self.layers * RANK * sum(a + b for a, b in self.linears)

    def rollout_bytes(self):
        """Weights, adapters and moments, cache, its state, evictions, and what reads the prompts."""
        n_full, n_columns, slots = self.layers // self.every, PROMPT + NEW, BUDGET + INTERVAL
        all_slots = n_full * slots + (self.layers - n_full) * (self.window or 0)
        cache = 2 * ROWS * self.kv * all_slots * self.hd * 2
        state = (8 + 4) * ROWS * self.kv * all_slots
        evictions = 2 * ROWS * n_full * self.kv * n_columns
        n_prompts = ROWS // GROUP
        prefill = n_prompts * PROMPT * (3.5 * self.f + 4 * self.d) * 2
        scores = 13 * min(n_prompts * self.heads * PROMPT**2, 2**26)
        step = ROWS * self.vocab * (2 + 8)
        models = 2 * self.n_weights + (4 + 8) * self.n_adapter
        return models + cache + state + evictions + max(prefill, scores, step)

    def update_bytes(self, n):
        """Models and gradients, what all layers keep, log-probs, and the batch of a row of n tokens."""
        q, k, d, f = self.heads * self.hd, self.kv * self.hd, self.d, self.f
        normed = self.norms * d + (q + k) * self.norms_heads
        statistics = self.norms + self.heads + (self.heads + self.kv) * self.norms_heads
        rest = 2 * d + 2 * q + 2 * k + 4 * f + 7 * RANK
        kept = self.layers * n * (4 * (normed + statistics) + 2 * rest)
        logits = 2 * 4 * min(n * self.vocab, 2**27)
        record = 4 * self.layers * self.kv * n
        return 2 * self.n_weights + (4 + 4 + 8) * self.n_adapter + kept + logits + 45 * n + record


QWEN3 = {"hd": 128, "vocab": 151_936, "kv": 8}
SHAPES = {
    "qwen3-0.6b": (Qwen3Config, Shape(28, 1024, 16, f=3072, is_tied=True, **QWEN3)),
    "qwen3-1.7b": (Qwen3Config, Shape(28, 2048, 16, f=6144, is_tied=True, **QWEN3)),
    "qwen3-4b": (Qwen3Config, Shape(36, 2560, 32, f=9728, is_tied=True, **QWEN3)),
    "qwen3-8b": (Qwen3Config, Shape(36, 4096, 32, f=12_288, is_tied=False, **QWEN3)),
    "llama-3.1-8b": (LlamaConfig, Shape(32, 4096, 32, 8, 128, 14_336, 128_256, False, norms_heads=False)),
    "gemma-3-4b": (
        Gemma3TextConfig,
        Shape(34, 2560, 8, 4, 256, 10_240, 262_208, True, norms=4, window=1024, every=6),
    ),
}


@pytest.mark.parametrize("name", short_tier([*SHAPES], ["qwen3-0.6b", "gemma-3-4b"]))
def test_a_plan_is_within_15_percent_of_formulas(name, tmp_path):
    kind, shape = SHAPES[name]
    windows = {} if shape.window is None else {"sliding_window": shape.window}
    kind(**shape.common, **windows).save_pretrained(tmp_path)
    settings = [
        *("recipe=llm", "distillation=none", f"model.path={tmp_path}", f"roles.rank={RANK}"),
        *(f"rollout.max_new_tokens={NEW}", f"rollout.n_prompts={ROWS // GROUP}"),
        *("cache.policy=h2o", f"cache.budget={BUDGET}", f"cache.interval={INTERVAL}"),
        *(f"algorithm.group_size={GROUP}", "roles.gradient_checkpointing=false"),
    ]
    cfg = plan.parse(settings).config
    card, roles = find_card("H200"), roles_of(cfg)
    planner = Planner(cfg, roles, pass_bytes_of(cfg, roles, card), card, PROMPT)
    rollout = planner.rollout_bytes(planner.cache, ROWS)
    assert sum(rollout.values()) == pytest.approx(shape.rollout_bytes(), rel=0.15)
    update = planner.update_bytes(1)
    assert sum(update.values()) == pytest.approx(shape.update_bytes(PROMPT + NEW), rel=0.15)
    # No total hides wrong weights.
    weights = 2 * shape.n_weights + 4 * shape.n_adapter
    assert planner.model_bytes["weights"] == pytest.approx(weights, rel=0.01)
