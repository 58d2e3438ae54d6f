"""Random mixtures of experts, caches and prompts: replay against own hooks and published formulas."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PreTrainedModel

from lit_rlkv import prepare_backbone, replay_logps
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.types import OWN_CHOICE, Rollout
from tests.explicit_routing import given_experts, perturb
from tests.fuzz import explicit
from tests.fuzz.harness import cases, run_cases
from tests.fuzz.test_core import SAMPLING, VOCAB, Sampling, random_sampling
from tests.models_zoo import build

LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {"n_shared_experts": 1, "first_k_dense_replace": 1, **LATENT}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 8},
    "qwen3_moe": {"head_dim": 8},
    "olmoe": {},
    "granitemoe": {},
    "deepseek_v2": {"topk_method": "group_limited_greedy"} | DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
}
"""Names of `CONFIG_MAPPING`, and what their configs need."""
GROUPED = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, kw_only=True)
class Case(Sampling):
    """One random model, cache and batch of prompts; `update` is the size of the update before replay."""

    family: str
    n_layers: int
    n_groups: int
    experts_per_group: int
    n_chosen: int
    is_normalised: bool
    update: float

    def model(self) -> PreTrainedModel:
        is_grouped, n_experts = self.family in GROUPED, self.n_groups * self.experts_per_group
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4 if is_grouped else 2,
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "num_local_experts": n_experts,
            "num_experts_per_tok": self.n_chosen,
            "max_position_embeddings": 256,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **FAMILIES[self.family],
        }
        if is_grouped:
            sizes |= {"n_routed_experts": sizes.pop("num_local_experts")}
            sizes |= {"n_group": self.n_groups, "topk_group": min(2, self.n_groups)}
        if self.family not in ("mixtral", "granitemoe", "deepseek_v2"):
            sizes["norm_topk_prob"] = self.is_normalised
        return build(CONFIG_MAPPING[self.family](**sizes))


@st.composite
def random_cases(draw: Any) -> Case:
    sampling = random_sampling(draw)
    sampling["spec"] = replace(sampling["spec"], dtype=None)  # experts are not computed in double precision
    experts_per_group, n_groups = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    return Case(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        n_layers=draw(st.integers(2, 3)),
        n_groups=n_groups,
        experts_per_group=experts_per_group,
        n_chosen=draw(st.integers(1, min(4, min(2, n_groups) * experts_per_group - 1))),
        is_normalised=draw(st.booleans()),
        update=draw(st.sampled_from([0.0, 0.1, 0.5])),
        **sampling | {"spec": draw(st.sampled_from([sampling["spec"]] * 2 + [CacheSpec.dense()]))},
    )


def errors(case: Case, rollout: Rollout, *, replayed: Rollout | None = None) -> tuple[float, float]:
    """Largest error of log-probs, and of gradients relative to the largest of their parameter.

    Both the learner and the own forward are after the update; the latter takes the experts of `rollout`.
    """
    model, own_model = prepare_backbone(case.model()), case.model()
    for each in (model, own_model):
        perturb(each, case.update)
    weight = torch.randn(rollout.input_ids.shape, generator=torch.Generator().manual_seed(1))
    found = replay_logps(model, replayed or rollout, temperature=case.temperature)
    (found * weight).sum().backward()
    with given_experts(own_model, rollout.record.expert_ids):
        own, _ = explicit.log_probs(own_model, rollout, case.temperature)
    (own * weight).sum().backward()
    return float((found - own).detach().abs().max()), max(explicit.gradient_errors(model, own_model).values())


def check(case: Case) -> Rollout:
    rollout = case.rollout(prepare_backbone(case.model()), record_routing=True)
    assert rollout.record.expert_ids is not None
    logps, gradients = errors(case, rollout)
    assert logps < 1e-4
    assert gradients < 1e-3
    if case.update == 0:
        replayed = replay_logps(prepare_backbone(case.model()), rollout, temperature=case.temperature)
        assert float((replayed - rollout.rollout_logps).detach().abs().max()) < 1e-4
    column = torch.arange(rollout.input_ids.shape[1])
    last = (column * rollout.attention_mask).amax(dim=1, keepdim=True)
    is_read = (rollout.attention_mask & (column < last))[:, None, None]
    assert torch.equal(rollout.record.expert_ids != OWN_CHOICE, is_read.expand_as(rollout.record.expert_ids))
    return rollout


@cases(12, 150)
def test_sampler_replay_and_an_own_forward_agree_on_the_experts(n_cases: int):
    run_cases(n_cases, check, case=random_cases())


EXAMPLE = Case(
    family="qwen3_moe",
    n_layers=2,
    n_groups=2,
    experts_per_group=4,
    n_chosen=2,
    is_normalised=True,
    update=0.5,
    **SAMPLING,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_catches_experts_of_today_and_those_of_another_token(family: str):
    case = replace(EXAMPLE, family=family)
    rollout = check(case)
    assert rollout.record.expert_ids is not None
    wrong = {
        "chosen anew": rollout.with_record(expert_ids=None),
        "of the token before": rollout.with_record(expert_ids=rollout.record.expert_ids.roll(1, dims=-1)),
    }
    if rollout.record.expert_ids.shape[1] > 1:
        wrong["of the other layer"] = rollout.with_record(expert_ids=rollout.record.expert_ids.flip(1))
    for name, other in wrong.items():
        assert min(errors(case, rollout, replayed=other)) > 1e-2, name


def test_weights_of_another_family_are_caught():
    case = replace(EXAMPLE, is_normalised=False)
    rollout = check(case)
    normalised = replace(case, is_normalised=True).model()
    own = case.model()
    assert own.config.norm_topk_prob != normalised.config.norm_topk_prob
    found = []
    for model in (own, normalised):
        perturb(model, case.update)
        with torch.no_grad(), given_experts(model, rollout.record.expert_ids):
            found.append(explicit.log_probs(model, rollout, 1.0)[0])
    assert float((found[0] - found[1]).abs().max()) > 1e-2
