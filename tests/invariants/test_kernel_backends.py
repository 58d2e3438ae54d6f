"""Invariant 4, of the kernels: Triton changes neither rollouts nor log-probs nor gradients."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kernels.quantization import KV_DTYPES
from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.types import Rollout
from tests.models_zoo import build, tiny_config
from tests.rollouts import died, gap, gaps, moved, roll_out, spec_of
from tests.tiers import short_tier, slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORED = ("h2o", "tova", "snapkv", "rkv", "keydiff", "expected")
"""Not knorm: in the first layer the keys of one token have equal norms, and rounding picks among them."""


@cache
def model_of(family: str) -> PreTrainedModel:
    """On the device whose kernels run, where the one that all tests share is not."""
    return prepare_backbone(build(tiny_config(family, num_hidden_layers=2)).to(DEVICE))


def sampled(kernels: str, cache: CacheSpec, family: str = "llama", **options: Any) -> Rollout:
    with use_kernels(kernels):
        return roll_out(model_of(family), cache, (11, 4), max_new_tokens=4, **options)


@cache
def by_triton(policy: str, family: str = "llama") -> Rollout:
    return sampled("triton", spec_of(policy, interval=2), family)


def logps_and_gradients(kernels: str, rollout: Rollout, family: str = "llama") -> list[Tensor]:
    """Log-probs under the shadow mask, and what the sum of their squares asks of every parameter."""
    model = model_of(family)
    with use_kernels(kernels):
        logps = replay_logps(model, rollout)
        gradients = torch.autograd.grad(
            logps.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
    return [logps.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", SCORED)
def test_a_greedy_rollout_and_its_evictions_are_those_of_the_definitions(policy: str):
    spec = spec_of(policy, interval=2)
    fast, plain = (sampled(kernels, spec, temperature=0.0) for kernels in ("triton", "reference"))
    assert torch.equal(fast.input_ids, plain.input_ids)
    assert torch.equal(fast.evicted_at, plain.evicted_at)
    assert died(fast).any(dim=-1).all(dim=(1, 2)).any()


REPLAYED = [*((policy, "llama") for policy in POLICIES), ("h2o", "gemma2")]


@pytest.mark.parametrize(("policy", "family"), short_tier(REPLAYED, [("h2o", "gemma2")]))
def test_replay_equals_rollout_when_both_run_kernels(policy: str, family: str):
    rollout = by_triton(policy, family)
    with use_kernels("triton"):
        found, blind = (gap(model_of(family), rollout, shadow=shadow) for shadow in (True, False))
    assert found < 1e-4
    assert blind > 100 * found


@pytest.mark.parametrize("dtype", short_tier(KV_DTYPES, ["int4"]))
def test_kernels_read_the_codes_of_a_quantized_cache(dtype: str):
    rollout = sampled("triton", spec_of("snapkv", interval=2, dtype=dtype))
    with use_kernels("triton"):
        assert gap(model_of("llama"), rollout) < 1e-4
        assert gaps(model_of("llama"), rollout.with_record(codes=None)).median() > 3e-4


@pytest.mark.parametrize("family", [slow("llama"), "gemma2"])
def test_log_probs_and_gradients_are_those_of_the_definitions(family: str):
    rollout = by_triton("h2o", family)
    fast, plain = (logps_and_gradients(kernels, rollout, family) for kernels in ("triton", "reference"))
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@pytest.mark.slow
def test_the_comparison_catches_an_eviction_too_late():
    rollout = by_triton("h2o")
    fast, plain = logps_and_gradients("triton", moved(rollout)), logps_and_gradients("reference", rollout)
    assert (fast[0] - plain[0]).abs().max() > 1e-2
