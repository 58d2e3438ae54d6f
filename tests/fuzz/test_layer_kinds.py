"""Random models whose layers are of all kinds: full, with windows or chunks, with states, with sinks.

The sampler's log-probs, the replayed ones and those of an own forward under an explicit mask, and their
gradients.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from lit_rlkv import prepare_backbone
from lit_rlkv.types import NEVER, Rollout
from tests.fuzz import explicit
from tests.fuzz.harness import cases, run_cases
from tests.fuzz.test_core import SAMPLING, VOCAB, Sampling, compare, random_sampling

FULL, SLIDING, CHUNKED, LINEAR = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)
WINDOWED = (SLIDING, CHUNKED, "hybrid_sliding")
ATTENDING = (FULL, *WINDOWED, "hybrid")
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gemma3_text": ((FULL, SLIDING), {}),
    "gpt_oss": ((FULL, SLIDING), EXPERTS),
    "llama4_text": ((FULL, CHUNKED), {**EXPERTS, "intermediate_size_mlp": 32, "num_experts_per_tok": 1}),
    "mimo_v2_flash": ((FULL, SLIDING), {**EXPERTS, "v_head_dim": 8}),
    "qwen3_next": ((FULL, LINEAR), EXPERTS | DELTA),
    "qwen3_5_text": ((FULL, LINEAR), DELTA),
    "lfm2": ((FULL, "conv"), {}),
    "nemotron_h": (
        (FULL, LINEAR, "mlp"),
        {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1},
    ),
    "falcon_h1": (
        ("hybrid",),
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
    ),
    "zaya": (("hybrid", "hybrid_sliding"), EXPERTS | {"num_experts_per_tok": 1}),
}
"""The kinds of layers of each family, and what its config needs beside the common sizes."""


@dataclass(frozen=True, kw_only=True)
class Mixed(Sampling):
    """One random model, cache and batch of prompts."""

    family: str
    kinds: tuple[str, ...]
    window: int

    @property
    def windowed(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.kinds) if kind in WINDOWED]

    @property
    def rows(self) -> dict[int, int]:
        """Row of the record for each layer that attends."""
        attending = [layer for layer, kind in enumerate(self.kinds) if kind in ATTENDING]
        return {layer: row for row, layer in enumerate(attending)}

    def model(self) -> PreTrainedModel:
        kind = CONFIG_MAPPING[self.family]
        names = {*kind().to_dict(), *kind.attribute_map}
        if self.family == "falcon_h1":  # whose layers are all of one kind
            names.remove("layer_types")
        given = {
            "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": len(self.kinds),
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32,
            "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
            "sliding_window": self.window, "attention_chunk_size": self.window,
            "layer_types": list(self.kinds),
            # Llama 4 rotates the keys of layers with chunks alone.
            "no_rope_layers": [int(one == CHUNKED) for one in self.kinds],
            **FAMILIES[self.family][1],
        }  # fmt: skip
        torch.manual_seed(self.seed)
        config = kind(**{name: value for name, value in given.items() if name in names})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
                parameter.add_(torch.randn_like(parameter), alpha=0.05)  # what starts at 0 or 1 has an effect
        if "num_experts" in FAMILIES[self.family][1]:
            model.set_experts_implementation("eager")  # the default has no double precision
        return self.exact(model)


@st.composite
def random_models(draw: Any) -> Mixed:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    # A model without a layer of the first kind, full or hybrid, could evict nothing.
    kinds = [kind for kind in FAMILIES[family][0] for _ in range(draw(st.integers(1, 4)))]
    sampling = random_sampling(draw)
    if not set(kinds) <= {FULL, SLIDING, CHUNKED}:  # states stay in float32, whose error moves codes
        sampling["spec"] = replace(sampling["spec"], dtype=None)
    return Mixed(
        family=family,
        kinds=tuple(draw(st.permutations(kinds))),
        window=draw(st.integers(1, 12) | st.integers(1, 64)),
        **sampling,
    )


def check(case: Mixed) -> Rollout:
    """Compare sampler, replay and own forward, values and gradients, and the deaths in every layer."""
    model = prepare_backbone(case.model())
    rollout, _ = compare(case, model, case.rollout(model), case.rows, case.windowed)
    for layer in case.windowed:
        check_window(case, rollout, layer)
    return rollout


def check_window(case: Mixed, rollout: Rollout, layer: int) -> None:
    """A key of a layer with a window dies `window` columns later, one of a chunk where the next begins."""
    mask, column = rollout.attention_mask, torch.arange(rollout.input_ids.shape[1])
    first = mask.int().argmax(1, keepdim=True)
    ends = column + case.window
    if case.kinds[layer] == CHUNKED:
        ends = first + ((column - first) // case.window + 1) * case.window
    last = (column * mask).amax(1, keepdim=True)
    is_dead = mask & (ends < last)
    for evicted_at in rollout.evicted_at[:, case.rows[layer]].unbind(1):
        assert torch.equal(evicted_at[is_dead], ends.expand_as(mask)[is_dead].int())


@cases(20, 120)
def test_sampler_replay_and_an_own_forward_agree_in_layers_of_all_kinds(n_cases: int):
    run_cases(n_cases, check, case=random_models())


EXAMPLE = Mixed(family="gpt_oss", kinds=(SLIDING, FULL, SLIDING), window=6, **SAMPLING)


def test_a_window_that_ends_a_column_early_is_caught_by_the_own_forward():
    rollout = check(EXAMPLE)
    early = rollout.evicted_at.clone()
    early[:, 0] = torch.where(early[:, 0] < NEVER, early[:, 0] - 1, early[:, 0])
    own, _ = explicit.log_probs(EXAMPLE.model(), rollout.with_record(evicted_at=early), 1.0, EXAMPLE.rows)
    assert (own - rollout.rollout_logps).abs().max() > 1e-3


def test_rows_of_the_record_that_stand_for_other_layers_are_caught():
    rollout = check(EXAMPLE)
    own, _ = explicit.log_probs(EXAMPLE.model(), rollout, 1.0, {0: 1, 1: 0, 2: 2})
    assert (own - rollout.rollout_logps).abs().max() > 1e-3
