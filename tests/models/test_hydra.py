import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import replay_logps
from lit_rlkv.models.hydra import acting_as, add_policy_adapter
from lit_rlkv.rollout import generate
from lit_rlkv.types import Rollout
from tests.models_zoo import PAD, ragged_prompts, tiny_model


@cache
def adapted() -> PreTrainedModel:
    """A backbone with a policy adapter that has moved away from its start."""
    model = add_policy_adapter(
        copy.deepcopy(tiny_model()), rank=4, alpha=8, target_modules=["q_proj", "v_proj"]
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=generator)
    return model


@cache
def rollout() -> Rollout:
    spec = CacheSpec(policy="snapkv", budget=8, interval=3, sink=1, window=3)
    return generate(
        tiny_model(), *ragged_prompts(), cache=spec, max_new_tokens=8, eos_token_id=None, pad_token_id=PAD
    )


def logps(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return replay_logps(model, rollout())


def logps_as(role: str) -> Tensor:
    with acting_as(adapted(), role):
        return logps(adapted())


def test_a_fresh_policy_is_the_base_model():
    fresh = add_policy_adapter(copy.deepcopy(tiny_model()), rank=4, alpha=8, target_modules="all-linear")
    assert torch.equal(logps(fresh), logps(tiny_model()))


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_a_role_without_adapter_is_bitwise_the_base_model(role: str):
    assert torch.equal(logps_as(role), logps(tiny_model()))


def test_the_policy_is_not_the_reference():
    assert (logps_as("policy") - logps_as("reference")).abs().max() > 0.1


def test_switching_roles_and_back_is_bitwise_neutral():
    before = logps_as("policy")
    logps_as("reference")
    assert torch.equal(logps_as("policy"), before)


def test_roles_nest():
    policy, reference = logps_as("policy"), logps_as("reference")
    with acting_as(adapted(), "reference"):
        with acting_as(adapted(), "policy"):
            assert torch.equal(logps(adapted()), policy)
        assert torch.equal(logps(adapted()), reference)


def test_the_role_before_is_restored_after_an_error():
    before = logps(adapted())
    with pytest.raises(RuntimeError, match="in the middle"), acting_as(adapted(), "reference"):
        raise RuntimeError("in the middle")
    assert torch.equal(logps(adapted()), before)


def test_only_the_adapter_trains_and_no_role_changes_that():
    trainable = {name for name, p in adapted().named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    for role in ("reference", "policy", "reward"):
        with acting_as(adapted(), role):
            assert {name for name, p in adapted().named_parameters() if p.requires_grad} == trainable
    assert {name for name, p in adapted().named_parameters() if p.requires_grad} == trainable


def test_the_policys_gradient_reaches_its_adapter_and_the_references_has_none():
    parameters = [p for p in adapted().parameters() if p.requires_grad]
    with acting_as(adapted(), "policy"):
        gradients = torch.autograd.grad(replay_logps(adapted(), rollout()).sum(), parameters)
    assert all(g.abs().max() > 0 for g in gradients)
    with acting_as(adapted(), "reference"):
        assert not replay_logps(adapted(), rollout()).requires_grad


def test_an_unknown_role_is_refused_with_those_to_choose_from():
    with (
        pytest.raises(ValueError, match=r"unknown role 'critic'; choose one of reference, reward, policy"),
        acting_as(adapted(), "critic"),
    ):
        pass


def test_the_policy_role_needs_its_adapter():
    with (
        pytest.raises(ValueError, match="needs its adapter; call add_policy_adapter"),
        acting_as(tiny_model(), "policy"),
    ):
        pass


def test_targets_that_name_no_module_are_refused():
    with pytest.raises(ValueError, match="nowhere"):
        add_policy_adapter(copy.deepcopy(tiny_model()), rank=4, alpha=8, target_modules=["nowhere"])
