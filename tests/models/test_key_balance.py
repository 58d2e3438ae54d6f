"""int4 does not see which channels of the keys are large, where the queries are small to match."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.key_balance import MOST_DOUBLINGS, key_balance
from lit_rlkv.types import Codes
from tests.models import test_hybrids
from tests.models_zoo import HEAD_DIM, LAYERS, tiny_model
from tests.rollouts import NOTICED, TOLERANCE, gap, roll_out, spec_of

FACTOR = 8.0


def with_outliers(factor: float) -> PreTrainedModel:
    """The tiny Llama as the same function, with keys so much larger in the second RoPE pair of each head."""
    model = copy.deepcopy(tiny_model("llama"))
    channel = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) == 1
    for layer in model.model.layers:
        for projection, by in ((layer.self_attn.k_proj, factor), (layer.self_attn.q_proj, 1 / factor)):
            weight = projection.weight.data
            weight[channel.repeat(len(weight) // HEAD_DIM)] *= by
    return model


@cache
def outliers() -> PreTrainedModel:
    return with_outliers(FACTOR)


def test_a_channel_is_divided_by_what_its_queries_lack():
    before, after = key_balance(tiny_model("llama")), key_balance(outliers())
    assert len(before) == len(after) == LAYERS
    channel = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) == 1
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, torch.where(channel, FACTOR * old, old))
        assert torch.equal(new.log2(), new.log2().round())
    most = max(float(each.max()) for each in key_balance(with_outliers(2.0**12)))
    assert most == 2.0**MOST_DOUBLINGS


def test_a_channel_without_keys_or_queries_is_left_alone():
    assert all((each == 1).all() for each in key_balance(with_zero_queries()))


def with_zero_queries() -> PreTrainedModel:
    model = copy.deepcopy(tiny_model("llama"))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
        layer.self_attn.k_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "expected", "random"])
def test_outlier_channels_change_no_number_of_the_rollout(policy: str):
    spec = spec_of(policy, dtype="int4")
    plain, rollout = roll_out("llama", spec), roll_out(outliers(), spec)
    assert torch.equal(rollout.input_ids, plain.input_ids)
    assert torch.equal(rollout.evicted_at, plain.evicted_at)
    torch.testing.assert_close(rollout.rollout_logps, plain.rollout_logps, rtol=0, atol=1e-5)
    assert gap(outliers(), rollout) < TOLERANCE
    unbalanced = rollout.with_record(codes=replace(rollout.record.codes, balance=()))
    assert gap(outliers(), unbalanced) > NOTICED


@pytest.mark.parametrize("policy", ["knorm", "keydiff"])
def test_policies_score_the_keys_as_they_are(policy: str):
    rollout = roll_out(outliers(), spec_of(policy, dtype="int4"))
    assert gap(outliers(), rollout) < TOLERANCE
    assert not torch.equal(rollout.evicted_at, roll_out("llama", spec_of(policy, dtype="int4")).evicted_at)


@pytest.mark.parametrize("name", test_hybrids.CONFIGS)
def test_layers_of_states_have_no_balance(name: str):
    model = prepare_backbone(test_hybrids.hybrid(name))
    rollout = roll_out(model, spec_of("h2o", dtype="int4"))
    assert len(rollout.record.codes.balance) == rollout.evicted_at.shape[1]


def test_other_codes_need_none():
    assert roll_out("llama", spec_of("h2o", dtype="int8")).record.codes.balance == ()


def test_rows_of_another_balance_are_not_joined():
    one, two = (
        Codes("int4", 64, torch.zeros(1, 1, 1, 3, 4, dtype=torch.uint8), (torch.full((1, 8), by),))
        for by in (1.0, 2.0)
    )
    assert Codes.cat([one, one]).record.shape[0] == 2
    with pytest.raises(ValueError, match="int4 keys have another balance cannot be joined"):
        Codes.cat([one, two])


def test_the_balance_goes_where_its_rollout_goes():
    rollout = roll_out("llama", spec_of("h2o", dtype="int4")).to("meta")
    assert {each.device.type for each in rollout.record.codes.balance} == {"meta"}
    assert rollout.record.codes.record.is_meta
