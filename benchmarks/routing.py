"""Experts that flip between sampler and learner, and the replay gap with and without routing replay.

    python benchmarks/routing.py [--device cuda] [--tokens 96]
    python benchmarks/routing.py --fast                   a look at the output, records nothing

Small random mixtures of experts sample under an evicting cache and are replayed: with the same weights, and
after one step of Adam on all weights, as GRPO makes it with random advantages of +1 and -1. A token flips in
a layer if the learner would choose another set of experts than the sampler did. The gap is |log π − log μ| in
nats, of learners that choose their experts and of learners that replay them: rounding with the same weights,
and what the update changed after it. Every run is a row of benchmarks/results/routing.jsonl.
"""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import record
import torch
from sampled import sample
from text_table import text_table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from lit_rlkv import CacheSpec, Rollout, prepare_backbone, replay_logps
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.models.replay import replay_evicted_at
from lit_rlkv.models.routing import by_token, recorded_experts, routers_of
from lit_rlkv.types import OWN_CHOICE

NAME = "routing"
VOCAB, HIDDEN, LAYERS = 1024, 128, 6
LAYER_SCALE, HEAD_SCALE = 4.0, 20.0
"""Factors on initial weights: a product over 128 columns then has the size of one over 2,048 at the usual
standard deviation, and log-probs are about -2, as of a pretrained model."""
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 2 * HIDDEN, "moe_intermediate_size": HIDDEN // 2,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES = {
    "Mixtral, 2 of 8": MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2),
    "Qwen3-MoE, 8 of 64": Qwen3MoeConfig(
        **SIZES, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True, head_dim=32
    ),
    "DeepSeek-V3, 4 of 32": DeepseekV3Config(
        **SIZES | LATENT | {"num_key_value_heads": 4}, n_routed_experts=32, num_experts_per_tok=4,
        n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2,
    ),
}  # fmt: skip
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATES = (0.0, 1e-6, 1e-5)
CACHE = CacheSpec("snapkv", budget=24, interval=8, sink=2, window=4)
MEASURES = (
    "flips per layer",
    "tokens that flip",
    "gap, chosen",
    "p99, chosen",
    "gap, replayed",
    "p99, replayed",
)


def make_model(family: str, seed: int, device: str) -> PreTrainedModel:
    """Return a random model of that family in float32."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family]).to(device).eval()
    model.lm_head.weight.data.mul_(HEAD_SCALE)
    for parameter in model.model.layers.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(LAYER_SCALE)
    return model


def sample_routed(model: PreTrainedModel, seed: int, n_rows: int, n_tokens: int, **sampling: Any) -> Rollout:
    """Return a rollout of random prompts with the sampler's experts."""
    generator = torch.Generator(model.device).manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (n_rows, 16), generator=generator, device=model.device)
    return sample(model, input_ids, CACHE, n_tokens, generator, record_routing=True, **sampling)


def step_of_adam(model: PreTrainedModel, rollout: Rollout, lr: float) -> PreTrainedModel:
    """Return a copy of the float32 model after the first step of Adam on the policy gradient."""
    learner = prepare_backbone(deepcopy(model))
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randint(0, 2, (len(rollout.input_ids), 1), generator=generator) * 2.0 - 1
    optimizer = torch.optim.Adam(learner.parameters(), lr=lr)
    loss = -(replay_logps(learner, rollout) * advantages.to(model.device)).sum()
    (loss / rollout.response_mask.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return learner


@torch.no_grad()
def measure(model: PreTrainedModel, rollout: Rollout) -> dict[str, float]:
    """Return the shares of flips, and the gap with and without replayed experts."""
    assert rollout.expert_ids is not None
    with recorded_experts(routers_of(model)) as read:
        positions = token_positions(rollout.attention_mask)
        hidden_states(model, rollout.input_ids, positions, evicted_at=replay_evicted_at(rollout))
        chosen = read()
    sampled = by_token(rollout.expert_ids)
    is_read = sampled[0, :, 0] != OWN_CHOICE
    flips = (chosen.sort(dim=-1).values != sampled.sort(dim=-1).values).any(dim=-1)[:, is_read]

    def gap(replayed: Rollout) -> Tensor:
        return (replay_logps(model, replayed) - rollout.rollout_logps).abs()[rollout.response_mask].double()

    own, same = gap(replace(rollout, expert_ids=None)), gap(rollout)
    figures = (
        flips.double().mean(), flips.any(dim=0).double().mean(),
        own.mean(), own.quantile(0.99), same.mean(), same.quantile(0.99),
    )  # fmt: skip
    return dict(zip(MEASURES, map(float, figures), strict=True))


def run(family: str, seed: int, device: str, n_rows: int, n_tokens: int) -> list[dict]:
    """Return the figures of each precision and learning rate; 0 is the sampler's own weights."""
    master = make_model(family, seed, device)
    found = []
    for precision, dtype in PRECISIONS.items():
        rollout = sample_routed(prepare_backbone(deepcopy(master).to(dtype)), seed, n_rows, n_tokens)
        for lr in LEARNING_RATES:
            after = step_of_adam(master, rollout, lr) if lr > 0 else deepcopy(master)
            figures = measure(prepare_backbone(after.to(dtype)), rollout)
            found.append({"family": family, "seed": seed, "precision": precision, "lr": lr, **figures})
    return found


def means(found: Sequence[dict]) -> list[list[str]]:
    """Return a line for each family, precision and learning rate: means over the seeds."""
    cases = dict.fromkeys((row["family"], row["precision"], row["lr"]) for row in found)
    lines = []
    for family, precision, lr in cases:
        mine = [
            row for row in found if (row["family"], row["precision"], row["lr"]) == (family, precision, lr)
        ]
        average = {name: sum(row[name] for row in mine) / len(mine) for name in MEASURES}
        shares = [f"{100 * average[name]:.2g} %" for name in MEASURES[:2]]
        gaps = [f"{average[name]:.1e}" for name in MEASURES[2:]]
        lines.append([family, precision, f"{lr:.0e}" if lr else "none", *shares, *gaps])
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=8, help="sequences (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="response tokens (%(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="models and rollouts of each family (%(default)s)"
    )
    parser.add_argument(
        "--fast", action="store_true", help="1 seed, 2 sequences of 16 tokens; records nothing"
    )
    asked = parser.parse_args(arguments)
    n_rows, n_tokens, n_seeds = (2, 16, 1) if asked.fast else (asked.rows, asked.tokens, asked.seeds)
    found = [
        row
        for family in FAMILIES
        for seed in range(n_seeds)
        for row in run(family, seed, asked.device, n_rows, n_tokens)
    ]
    print(
        f"{n_seeds} seeds, {n_rows} sequences of {n_tokens} tokens on {asked.device}, cache {CACHE.label}\n"
    )
    print(text_table(("family", "precision", "update, lr", *MEASURES), means(found), n_left=3))
    if not asked.fast:
        settings = {"on": asked.device, "n_rows": n_rows, "n_tokens": n_tokens, "cache": CACHE.label}
        record.append(NAME, settings | {"figures": found})


if __name__ == "__main__":
    main()
