"""Rollouts and their replay on a pretended device: no tensor is left on the CPU, and no decode step waits."""

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.kernels.quantization import KV_DTYPES
from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.kvcache.value_norms import projected_norms
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.output_projection import _weight
from lit_rlkv.rollout import generate
from lit_rlkv.types import Rollout
from tests.models.test_attention_sinks import gpt_oss
from tests.models_zoo import PAD, build, ragged_prompts, tiny_config, with_scorer
from tests.rollout.pretend import THERE, PretendedDevice, WatchedRunner
from tests.rollouts import TOLERANCE, spec_of
from tests.tiers import diagonal

MODELS = {
    "plain": lambda: build(tiny_config("qwen3", num_hidden_layers=1)),
    "window": lambda: build(tiny_config("gemma2", num_hidden_layers=2, sliding_window=5)),
    "sink and window": gpt_oss,
}


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` has no autocast, and what torch.tensor makes there has no numbers."""
    tensor = torch.tensor
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    monkeypatch.setattr(
        torch, "tensor", lambda *args, device=None, **options: tensor(*args, **options).to(device or "cpu")
    )
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", WatchedRunner)


@cache
def models_of(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model on the CPU and its copy on the device."""
    model = with_scorer(prepare_backbone(MODELS[kind]()))
    with PretendedDevice():
        return model, copy.deepcopy(model).to(THERE)


def sampled(model: PreTrainedModel, spec: CacheSpec) -> tuple[Rollout, torch.Tensor]:
    """Return a rollout and its replay."""
    prompts = (tensor.to(model.device) for tensor in ragged_prompts((11, 4)))
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": PAD}
    rollout = generate(model, *prompts, cache=spec, generator=torch.Generator().manual_seed(0), **options)
    return rollout, replay_logps(model, rollout)


@pytest.mark.parametrize(
    ("policy", "dtype", "kind"),
    diagonal(["dense", *POLICIES], (None, *KV_DTYPES), MODELS),
)
@torch.no_grad()
def test_a_rollout_on_a_device_is_that_on_a_cpu(policy: str, dtype: str | None, kind: str):
    here, there = models_of(kind)
    if policy == "triattention" and kind == "sink and window":
        pytest.skip("its RoPE has no rotate_half, so that TriAttention refuses it")
    spec = spec_of(policy, interval=2, window=2, dtype=dtype)
    expected, _ = sampled(here, spec)
    with PretendedDevice():
        found, replayed = sampled(there, spec)
        assert {found.input_ids.device, found.evicted_at.device, replayed.device} == {THERE}
        gap = float((replayed - found.rollout_logps).abs().max())
        ids, evicted_at = found.input_ids.cpu(), found.evicted_at.cpu()
    assert torch.equal(ids, expected.input_ids)
    assert torch.equal(evicted_at, expected.evicted_at)
    assert gap < TOLERANCE


@pytest.mark.parametrize("kind", ["Linear", "Quantized"])
@torch.no_grad()
def test_norms_of_projected_values_wait_for_nothing(kind: str):
    linear, values = torch.nn.Linear(8, 6), torch.randn(2, 2, 5, 4)
    expected = (values @ linear.weight.T.view(2, 4, 6)).abs().sum(-1)
    if kind != "Linear":
        linear.__class__ = type(kind, (torch.nn.Linear,), {})
    with PretendedDevice():
        layer, there, before = linear.to(THERE), values.to(THERE), len(PretendedDevice.waits)
        found = projected_norms(there, _weight(layer, torch.float32, THERE))
        assert PretendedDevice.waits[before:] == []
        torch.testing.assert_close(found.cpu(), expected)


def test_tensors_of_two_devices_and_steps_that_wait_are_refused():
    def _decode() -> None:
        torch.ones(3, device=THERE).sum().item()

    with PretendedDevice():
        assert float(torch.ones(3, device=THERE).sum() + torch.tensor(1.0)) == 4.0
        with pytest.raises(RuntimeError, match="gets tensors of the device and of the CPU"):
            torch.ones(3, device=THERE) + torch.ones(3)
        with pytest.raises(RuntimeError, match="a step waits"):
            WatchedRunner(None, is_enabled=True)(_decode)
