from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jaxtyping
import pytest

from lit_rlkv.kvcache import POLICIES, CacheSpec


@pytest.fixture
def _as_users_run_it() -> Iterator[None]:
    """Without the type checks of the test run, which would raise before the spec does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("snapvk", "snapkv"),
        ("snap_kv", "snapkv"),
        ("pyramid", "cache.budget_profile=pyramid"),
        ("PyramidKV", "cache.budget_profile=pyramid"),
        ("pyramyd", "cache.budget_profile=pyramid"),
    ],
)
def test_an_unknown_policy_is_refused_with_the_one_meant_and_those_to_choose_from(name: str, meant: str):
    says = rf"unknown cache policy '{name}' \(did you mean {meant}\?\); choose one of dense, .*snapkv"
    with pytest.raises(ValueError, match=says):
        CacheSpec(policy=name)
    with pytest.raises(ValueError, match="unknown cache policy 'zzz'; choose one of dense"):
        CacheSpec(policy="zzz")


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize("name", ["budget", "interval", "sink", "window"])
@pytest.mark.parametrize("value", [0.5, 64.0, True, "64", None])
def test_counts_that_are_no_integers_are_refused(name: str, value: object):
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=rf"{name} must be a whole number of at least .*, got"):
        CacheSpec(**settings)


@pytest.mark.parametrize(("name", "least"), [("budget", 1), ("interval", 1), ("sink", 0), ("window", 1)])
def test_counts_below_their_least_are_refused(name: str, least: int):
    settings: dict[str, Any] = {name: least - 1}
    with pytest.raises(ValueError, match=rf"{name} must be .* at least {least}, got {least - 1}"):
        CacheSpec(**settings)


@pytest.mark.parametrize("policy", ["dense", "snapkv"])
def test_options_of_a_policy_that_takes_none_are_refused(policy: str):
    with pytest.raises(ValueError, match=f"policy_options={{'pool': 3}} have no effect on {policy}; leave"):
        CacheSpec(policy=policy, policy_options={"pool": 3})


def test_only_rollouts_draw_the_survivors_of_a_trained_policy():
    spec = CacheSpec("learned", policy_options={"hidden": 3})
    policies = [spec.make_policy(), spec.for_rollouts.make_policy()]
    assert [(policy.draws, policy.hidden) for policy in policies] == [(False, 3), (True, 3)]  # type: ignore[union-attr, attr-defined]
    assert CacheSpec("snapkv").for_rollouts == CacheSpec("snapkv")


@pytest.mark.parametrize("options", [{"hidden": 0}, {"samples": "yes"}, {"depth": 2}])
def test_wrong_options_of_a_trained_policy_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(options))):
        CacheSpec("learned", policy_options=options)


def test_sinks_and_window_must_leave_a_slot_to_choose():
    message = (
        r"budget must be at least sink \+ window \+ 1 = 21, got 20; raise the budget, or lower sink or window"
    )
    with pytest.raises(ValueError, match=message):
        CacheSpec(budget=20, sink=4, window=16)
    assert CacheSpec(budget=21, sink=4, window=16).budget == 21


def test_a_spec_cannot_be_changed_after_it_was_checked():
    with pytest.raises(AttributeError):
        CacheSpec().budget = 3  # type: ignore[misc]


def test_a_dtype_that_no_rounding_has_is_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of int8, fp8, int4 or null, got int3"):
        CacheSpec(dtype="int3")


def test_a_quantized_cache_says_so_in_its_label_and_is_not_exact():
    assert CacheSpec("h2o", budget=32, interval=8, dtype="int4").label == "h2o 32+8 int4"
    rounded = replace(CacheSpec.dense(), dtype="int8")
    assert (rounded.label, rounded.is_dense, rounded.is_exact) == ("dense int8", True, False)
    assert CacheSpec.dense().is_exact
