import json
from dataclasses import replace

import pytest
import torch

from lit_rlkv.callbacks.cache_statistics import CacheStatistics
from lit_rlkv.diagnostics.evictions import lifetimes, retained_fraction
from lit_rlkv.types import NEVER
from tests.callbacks.measuring import measured
from tests.hand_built import ARMS, make_datamodule, make_roles, shift

TRIVIAL = {
    "kv/retained": 1.0,
    "kv/retained_last": 1.0,
    "kv/never_evicted": 1.0,
    "kv/attention_kept": 1.0,
    "kv/attention_kept_p05": 1.0,
    "kv/attention_on_dead": 0.0,
    "kv/needs_dead_key": 0.0,
    "kv/dead_key_on_top": 0.0,
}


def roll_out(arm="shadow", layout="hydra"):
    roles = shift(make_roles(layout), std=0.3)
    return roles, make_datamodule(roles, correction=ARMS[arm], rollout={"max_new_tokens": 20}).collect()


def test_counts_are_of_the_whole_rollout_and_attention_of_some_rows():
    roles, experience = roll_out()
    few, _ = measured(CacheStatistics(n_rows=2), roles, experience)
    every, _ = measured(CacheStatistics(n_rows=99), roles, experience)
    assert (
        few["kv/retained"] == every["kv/retained"] == float(retained_fraction(experience.rollout)[0].mean())
    )
    n_evicted, n_kept = (int(counts.sum()) for counts in lifetimes(experience.rollout))
    assert few["kv/never_evicted"] == n_kept / (n_kept + n_evicted)
    assert few["kv/attention_kept"] != every["kv/attention_kept"]


def test_what_is_kept_and_what_is_lost_make_up_all_attention():
    roles, experience = roll_out()
    found, arrays = measured(CacheStatistics(), roles, experience)
    assert found["kv/attention_kept"] + found["kv/attention_on_dead"] == pytest.approx(1.0)
    assert 0 < found["kv/attention_kept_p05"] < found["kv/attention_kept"] < 1
    assert 0 < found["kv/dead_key_on_top"] < found["kv/needs_dead_key"] < 1
    assert len(arrays["position"]) == len(arrays["attention_on_dead"][0])
    json.dumps(arrays, allow_nan=False)


def test_without_evictions_everything_is_retained_and_no_forward_is_run():
    roles, experience = roll_out("dense")
    calls = []
    roles.backbone("policy").base_model.register_forward_hook(lambda *call: calls.append(call))
    found, arrays = measured(CacheStatistics(), roles, experience)
    assert found == TRIVIAL
    assert arrays == {}
    assert calls == []
    # One evicted_at is enough to make it look.
    rollout = experience.rollout
    evicted_at = rollout.evicted_at.clone()
    evicted_at[0, 0, 0, int(rollout.attention_mask[0].int().argmax())] = rollout.input_ids.shape[1] - 3
    found, _ = measured(
        CacheStatistics(), roles, replace(experience, rollout=rollout.with_record(evicted_at=evicted_at))
    )
    assert len(calls) == 1
    assert 0.9 < found["kv/attention_kept"] < 1


def test_evicting_all_keys_leaves_a_query_its_own_key():
    roles, experience = roll_out()
    rollout = experience.rollout
    born = torch.arange(rollout.input_ids.shape[1]).int()
    evicted_at = (
        torch.where(rollout.attention_mask[:, None, None], born + 1, 0)
        .expand_as(rollout.evicted_at)
        .contiguous()
    )
    found, _ = measured(
        CacheStatistics(), roles, replace(experience, rollout=rollout.with_record(evicted_at=evicted_at))
    )
    assert found["kv/lifetime_mean"] == found["kv/lifetime_median"] == 1
    assert found["kv/attention_kept"] < 0.3
    assert found["kv/dead_key_on_top"] > 0.7
    assert (rollout.evicted_at != NEVER).any()


def test_bf16_attention_is_that_of_float32_but_for_rounding():
    roles, experience = roll_out()
    exact, _ = measured(CacheStatistics(), roles, experience)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = measured(CacheStatistics(), roles, experience)
    assert rounded["kv/attention_kept"] == pytest.approx(exact["kv/attention_kept"], abs=0.02)
    assert rounded["kv/attention_kept"] != exact["kv/attention_kept"]


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds():
    roles, experience = roll_out()
    expected, _ = measured(CacheStatistics(), roles, experience)
    on_gpu = replace(experience, rollout=experience.rollout.to("cuda"))
    found, _ = measured(CacheStatistics(), roles.to("cuda"), on_gpu)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
