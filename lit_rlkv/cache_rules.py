"""Rules for the settings of a KV cache, without torch: the config checks them before any slow import."""

from collections.abc import Mapping
from typing import Any

from lit_rlkv.checks import MAX_WHOLE, is_whole

DENSE = "dense"
"""Policy that keeps every key."""
POLICY_NAMES = (
    "streaming",
    "h2o",
    "snapkv",
    "rkv",
    "tova",
    "knorm",
    "keydiff",
    "expected",
    "vase",
    "gkv",
    "random",
)
"""Eviction policies of `lit_rlkv.kvcache.policies.POLICIES`."""
LEAST = {"budget": 1, "interval": 1, "sink": 0, "window": 1}
"""Smallest value of each size."""


def check_policy_name(name: str) -> None:
    """Check that a policy is known, or is the dotted name of a class, which is not looked up here.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in (DENSE, *POLICY_NAMES) and "." not in name:
        known = ", ".join([DENSE, *POLICY_NAMES])
        raise ValueError(
            f"unknown cache policy {name!r}; choose one of {known}, or name a class of your own such as "
            "mypackage.policies.MyPolicy"
        )


def check_no_options(policy: str, options: Mapping[str, Any]) -> None:
    """Refuse options for a policy that takes none.

    Raises:
        ValueError: there are options.
    """
    if options:
        raise ValueError(f"policy_options={dict(options)} have no effect on {policy}; leave them out")


def check_sizes(*, budget: int, interval: int, sink: int, window: int, is_dense: bool) -> None:
    """Check the sizes of a cache.

    Args:
        is_dense: True if nothing is evicted, so that the budget may be any size.

    Raises:
        ValueError: a size is not an integer or too small, or the budget is below sink + window + 1.
    """
    sizes = {"budget": budget, "interval": interval, "sink": sink, "window": window}
    for name, value in sizes.items():
        if not is_whole(value):
            raise ValueError(f"cache.{name} must be an integer, got {value!r}; give a whole number")
        if value < LEAST[name]:
            raise ValueError(f"cache.{name} must be at least {LEAST[name]}, got {value}; raise it")
        if value > MAX_WHOLE:
            raise ValueError(f"cache.{name} must be at most {MAX_WHOLE}, got {value}; lower it")
    least = sink + window + 1
    if not is_dense and budget < least:
        raise ValueError(
            f"budget must be at least sink + window + 1 = {least}, got {budget}; raise the budget, or lower "
            "sink or window"
        )
