from dataclasses import replace
from typing import Any

import pytest

from lit_rlkv.kvcache import POLICIES, CacheSpec


def test_slots_are_budget_plus_interval_for_any_longer_sequence():
    spec = CacheSpec(policy="snapkv", budget=512, interval=128)
    assert spec.n_slots(640) == spec.n_slots(100_000) == 640
    assert spec.n_slots(100) == 100


def test_a_dense_cache_has_a_slot_for_every_token_and_no_policy():
    spec = CacheSpec.dense()
    assert spec.is_dense
    assert spec.n_slots(77) == 77
    assert spec.make_policy() is None


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_spec_that_makes_it(name: str):
    spec = CacheSpec(policy=name)
    assert not spec.is_dense
    assert isinstance(spec.make_policy(), POLICIES[name])


def unknown(name: str, meant: str) -> tuple[dict[str, Any], str]:
    says = rf"unknown cache policy '{name}' \(did you mean {meant}\?\); choose one of dense, .*snapkv"
    return {"policy": name}, says


REFUSED: list[tuple[dict[str, Any], str]] = [
    unknown("snapvk", "snapkv"),
    unknown("snap_kv", "snapkv"),
    *(unknown(name, "cache.budget_profile=pyramid") for name in ("pyramid", "PyramidKV", "pyramyd")),
    ({"policy": "zzz"}, "unknown cache policy 'zzz'; choose one of dense"),
    *(
        ({name: value}, rf"{name} must be a whole number of at least .*, got")
        for name in ("budget", "interval", "sink", "window")
        for value in (0.5, 64.0, True, "64", None)
    ),
    *(
        ({name: least - 1}, rf"{name} must be .* at least {least}, got {least - 1}")
        for name, least in {"budget": 1, "interval": 1, "sink": 0, "window": 1}.items()
    ),
    *(
        (
            {"policy": policy, "policy_options": {"pool": 3}},
            f"policy_options={{'pool': 3}} have no effect on {policy}; leave",
        )
        for policy in ("dense", "knorm")
    ),
    ({"policy": POLICIES["knorm"], "policy_options": {"pool": 3}}, "; it takes no options"),
    *(
        ({"policy": "learned", "policy_options": {name: value}}, name)
        for name, value in {"hidden": 0, "samples": "yes", "depth": 2}.items()
    ),
    (
        {"budget": 20, "sink": 4, "window": 16},
        r"at least sink \+ window \+ 1 = 21, got 20; raise the budget, or lower sink or window",
    ),
    ({"dtype": "int3"}, "dtype must be one of int8, fp8, int4 or null, got 'int3'"),
]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(("settings", "says"), REFUSED)
def test_what_no_cache_can_be_is_refused(settings: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        CacheSpec(**settings)


def test_sinks_and_window_must_leave_one_slot_to_choose():
    assert CacheSpec(budget=21, sink=4, window=16).budget == 21


def test_only_rollouts_draw_the_survivors_of_a_trained_policy():
    spec = CacheSpec("learned", policy_options={"hidden": 3})
    policies = [spec.make_policy(), spec.for_rollouts.make_policy()]
    assert [(policy.draws, policy.hidden) for policy in policies] == [(False, 3), (True, 3)]  # type: ignore[union-attr, attr-defined]
    assert CacheSpec("snapkv").for_rollouts == CacheSpec("snapkv")


def test_a_spec_cannot_be_changed_after_it_was_checked():
    with pytest.raises(AttributeError):
        CacheSpec().budget = 3  # type: ignore[misc]


def test_caches_that_differ_in_an_option_differ_in_their_label():
    options = {"value_norms": True}
    weighs = CacheSpec("h2o", budget=32, interval=8, policy_options=options)
    assert weighs.label == "h2o value_norms=true 32+8"
    assert replace(weighs, policy_options={}).label == "h2o 32+8"
    gkv = CacheSpec("learned", policy_options={"samples": True, "hidden": 3}).label
    assert gkv == CacheSpec("learned", policy_options={"hidden": 3, "samples": True}).label
    assert gkv == "learned hidden=3 samples=true 512+128"


def test_a_quantized_cache_says_so_in_its_label_and_is_not_exact():
    assert CacheSpec("h2o", budget=32, interval=8, dtype="int4").label == "h2o 32+8 int4"
    rounded = replace(CacheSpec.dense(), dtype="int8")
    assert (rounded.label, rounded.is_dense, rounded.is_exact) == ("dense int8", True, False)
    assert CacheSpec.dense().is_exact
