"""Rounded keys and values: the learner replays what the sampler's cache held, code by code.

The record of the codes makes it exact in float32. In float64 it is exact without the record, too, because no
float error moves a number to another code: so the learner rounds as the sampler does, number by number.
"""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.kernels.quantization import KV_DTYPES, quantized_bytes
from lit_rlkv.kvcache import POLICIES
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.types import NEVER, Rollout
from tests.models import test_hybrids, test_sliding_windows
from tests.models_zoo import FAMILIES, HEAD_DIM, LAYERS, build, tiny_config, tiny_model
from tests.rollouts import LENS, gap, roll_out, spec_of
from tests.rollouts import TOLERANCE as FLOAT32_TOLERANCE
from tests.tiers import diagonal, every_nth

TOLERANCE = 2e-6
"""Log-probs are kept in float32, whose rounding at 10 nats is 1e-6."""
NOTICED = 1e-3
"""Gap of a learner that rounds in another way, at least."""
CROSS = diagonal(["dense", *POLICIES], KV_DTYPES)


@cache
def in_double(family: str = "qwen3") -> PreTrainedModel:
    return copy.deepcopy(tiny_model(family)).double()


def by_itself(rollout: Rollout) -> Rollout:
    """The rollout for a learner that rounds without the record of the codes."""
    return with_codes(rollout, record=rollout.record.codes.record[..., :0, :])


def with_codes(rollout: Rollout, **changes: Any) -> Rollout:
    return rollout.with_record(codes=replace(rollout.record.codes, **changes))


@pytest.mark.parametrize(("policy", "dtype"), CROSS)
def test_the_learner_replays_rounded_keys_and_values_exactly(policy: str, dtype: str):
    rollout = roll_out(in_double(), spec_of(policy, dtype=dtype))
    assert rollout.record.codes.dtype == dtype
    assert gap(in_double(), rollout) < TOLERANCE
    assert gap(in_double(), by_itself(rollout)) < TOLERANCE
    assert gap(in_double(), rollout.with_record(codes=None)) > NOTICED
    for other in {*KV_DTYPES} - {dtype}:
        assert gap(in_double(), with_codes(by_itself(rollout), dtype=other)) > NOTICED, other


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_dense_learner_does_not_round(dtype: str):
    rollout = roll_out(in_double(), spec_of("dense", dtype=dtype))
    assert gap(in_double(), rollout, shadow=False) == gap(in_double(), rollout.with_record(codes=None))


@pytest.mark.parametrize("family", every_nth(3, FAMILIES))
def test_every_family_rounds(family: str):
    for dtype in KV_DTYPES:
        assert gap(in_double(family), roll_out(in_double(family), spec_of("h2o", dtype=dtype))) < TOLERANCE


@pytest.mark.parametrize(("dtype", "family"), diagonal(KV_DTYPES, test_sliding_windows.CASES))
def test_rings_of_windows_hold_codes(family: str, dtype: str):
    model = test_sliding_windows.windowed(family)
    if family in test_sliding_windows.OTHERS:
        model.set_experts_implementation("eager")  # the default has no double precision
    model = prepare_backbone(model.double())
    rollout = roll_out(model, spec_of("h2o", dtype=dtype), max_new_tokens=24, prefill_chunk=4)
    assert gap(model, rollout) < TOLERANCE
    assert gap(model, rollout.with_record(codes=None)) > NOTICED


@pytest.mark.parametrize(("dtype", "name"), diagonal(KV_DTYPES, test_hybrids.CONFIGS))
def test_states_beside_the_keys_are_not_rounded(name: str, dtype: str):
    model = prepare_backbone(test_hybrids.hybrid(name))
    rollout = roll_out(model, spec_of("h2o", dtype=dtype))
    assert gap(model, rollout) < FLOAT32_TOLERANCE
    assert gap(model, rollout.with_record(codes=None)) > 5 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_record_keeps_codes_that_an_error_of_the_learner_would_move(dtype: str):
    torch.manual_seed(0)
    model = prepare_backbone(build(tiny_config("qwen3", num_hidden_layers=6)))
    rollout = roll_out(model, spec_of("h2o", dtype=dtype), max_new_tokens=40)
    learner = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in learner.parameters():
        parameter.data.mul_(1 + 1e-5 * torch.randn(parameter.shape, generator=generator))
    assert gap(model, rollout) < 1e-5
    assert gap(learner, rollout) < 1e-4
    assert gap(learner, by_itself(rollout)) > 2e-3
    wrong = with_codes(rollout, record=rollout.record.codes.record.roll(1, dims=-1))
    assert gap(model, wrong) > 2e-3


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_bytes_are_those_of_codes_and_scales(dtype: str):
    rollout = roll_out(tiny_model("qwen3"), spec_of("snapkv", dtype=dtype))
    vector = quantized_bytes(HEAD_DIM, dtype, torch.float32)
    assert rollout.kv_bytes == 2 * LAYERS * len(LENS) * 2 * (8 + 3) * vector
    whole = roll_out(tiny_model("qwen3"), spec_of("snapkv", dtype=None))
    assert rollout.kv_bytes < whole.kv_bytes / 2


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_gradients_are_those_of_attention_at_the_rounded_numbers(dtype: str):
    model = copy.deepcopy(in_double())
    rollout = roll_out(model, spec_of("h2o", dtype=dtype))
    (replay_logps(model, rollout) * rollout.response_mask).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    key = next(p for name, p in model.named_parameters() if name.endswith("k_proj.weight"))
    assert key.grad is not None
    assert key.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_learned_policy_with_a_budget_of_each_layer_is_replayed(dtype: str):
    spec = spec_of("learned", dtype=dtype, budget_profile=(13, 5, 6))
    rollout = roll_out(in_double(), spec, prefill_chunk=4)
    held = (rollout.evicted_at == NEVER).sum(-1)  # at the end
    assert held[:, 0].min() > held[:, 1].max()
    assert gap(in_double(), rollout) < TOLERANCE
    swapped = rollout.with_record(evicted_at=rollout.evicted_at.roll(1, dims=1))
    for wrong in (swapped, rollout.with_record(codes=None)):
        assert gap(in_double(), wrong) > NOTICED
