"""Invariants 2 and 3: the learner's log-probs under the evictions are the sampler's, and no others are."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kvcache import POLICIES
from lit_rlkv.models import replay_logps
from lit_rlkv.models.backbone import hidden_states, rope_frequencies, token_positions
from lit_rlkv.models.replay import response_logps
from lit_rlkv.types import Rollout
from tests.hand_built import replayed
from tests.models_zoo import FAMILIES, tiny_model
from tests.rollouts import SIZES, TOLERANCE, died, gap, moved, roll_out
from tests.tiers import diagonal

FLOAT_ERROR = 1e-6
"""Gap that stands for exactly 0 when a control is compared with it."""

CASES = [
    *diagonal(FAMILIES, POLICIES, [2]),
    *(("qwen3", policy, n_kv_heads) for policy in POLICIES for n_kv_heads in (1, 4)),
]
"""Family, policy, KV heads of four query heads."""


@cache
def sampled(family: str, policy: str, n_kv_heads: int = 2) -> Rollout:
    return roll_out(tiny_model(family, n_kv_heads), policy, eos_token_id=5)


@pytest.mark.parametrize(("family", "policy", "n_kv_heads"), CASES)
def test_a_learner_with_the_mask_has_the_samplers_log_probs_and_one_without_it_has_not(
    family: str, policy: str, n_kv_heads: int
):
    model = tiny_model(family, n_kv_heads)
    if POLICIES[policy].reads_rope and rope_frequencies(model) is None:
        with pytest.raises(ValueError, match="needs RoPE on the halves of heads"):
            sampled(family, policy, n_kv_heads)
        return
    rollout = sampled(family, policy, n_kv_heads)
    found = gap(model, rollout)
    assert found < TOLERANCE
    assert gap(model, rollout, shadow=False) > 100 * max(found, FLOAT_ERROR)
    # rows in which every head of every layer evicted
    assert died(rollout).any(dim=-1).all(dim=(1, 2)).sum() >= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gap_is_rounding_and_vanishes_in_float64(policy: str):
    model = copy.deepcopy(tiny_model("qwen3")).double()
    # Log-probs are kept in float32, whose rounding at 10 nats is 1e-6.
    assert gap(model, roll_out(model, policy, eos_token_id=5)) < 2e-6


def permute_evicted_at(rollout: Rollout, dim: int) -> Rollout:
    """Each layer or KV head with its neighbour's evictions; those of padding are the same in all."""
    return rollout.with_record(evicted_at=rollout.evicted_at.roll(1, dims=dim))


CONTROLS: dict[str, Callable[[Rollout], Rollout]] = {
    "evictions one too late": moved,
    "evictions one too early": lambda rollout: moved(rollout, -1),
    "evictions an interval too late": lambda rollout: moved(rollout, SIZES["interval"]),
    "layers swapped": lambda rollout: permute_evicted_at(rollout, 1),
    "KV heads swapped": lambda rollout: permute_evicted_at(rollout, 2),
    "one layer's mask for all": lambda rollout: rollout.with_record(
        evicted_at=rollout.evicted_at[:, :1].expand_as(rollout.evicted_at)
    ),
    "the union over heads": lambda rollout: rollout.with_record(
        evicted_at=rollout.evicted_at.amax(2, keepdim=True).expand_as(rollout.evicted_at)
    ),
}
SAME_IN_ALL_LAYERS_AND_HEADS = {"streaming"}
SAME_IN_ALL_HEADS = {"streaming", "tova"}


def is_no_change(control: str, policy: str) -> bool:
    """Some policies keep one set for all heads, or for all layers too."""
    if control in ("layers swapped", "one layer's mask for all"):
        return policy in SAME_IN_ALL_LAYERS_AND_HEADS
    return control in ("KV heads swapped", "the union over heads") and policy in SAME_IN_ALL_HEADS


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_is_nearly_right_is_caught(policy: str, control: str):
    model, rollout = tiny_model("qwen3"), sampled("qwen3", policy)
    wrong = CONTROLS[control](rollout)
    if is_no_change(control, policy):
        assert torch.equal(wrong.evicted_at, rollout.evicted_at)
    else:
        assert gap(model, wrong) > 100 * max(gap(model, rollout), FLOAT_ERROR)


@pytest.mark.parametrize("control", ["evictions one too late", "evictions one too early", "layers swapped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_that_is_nearly_right_is_caught_in_every_family(family: str, control: str):
    model, rollout = tiny_model(family), sampled(family, "snapkv")
    assert gap(model, CONTROLS[control](rollout)) > 100 * max(gap(model, rollout), FLOAT_ERROR)


def test_positions_that_close_up_after_an_eviction_are_caught():
    model, rollout = tiny_model("qwen3"), sampled("qwen3", "snapkv")

    def gap_at(positions: Tensor) -> float:
        record = replayed(rollout).until(-1)
        hidden = hidden_states(model, rollout.input_ids[:, :-1], positions[:, :-1], record=record)
        logps = response_logps(model, rollout, hidden[rollout.response_mask[:, 1:]], temperature=1.0)
        return float((logps - rollout.rollout_logps).detach().abs().max())

    true_positions = token_positions(rollout.attention_mask)
    assert gap_at(true_positions) < TOLERANCE
    assert gap_at(true_positions.clamp(max=10)) > 100 * TOLERANCE


def first_step_ratio(model: PreTrainedModel, rollout: Rollout, *, shadow: bool) -> Tensor:
    with torch.no_grad():
        return (replay_logps(model, rollout, shadow=shadow) - rollout.rollout_logps).exp()[
            rollout.response_mask
        ]


@pytest.mark.parametrize("policy", POLICIES)
def test_importance_ratios_are_one_before_the_first_update_and_nothing_is_clipped(policy: str):
    model, rollout = tiny_model("qwen3"), sampled("qwen3", policy)
    replayed, dense = (first_step_ratio(model, rollout, shadow=shadow) for shadow in (True, False))
    torch.testing.assert_close(replayed, torch.ones_like(replayed), rtol=0, atol=TOLERANCE)
    assert ((dense < 0.8) | (dense > 1.2)).float().mean() > 0.05
