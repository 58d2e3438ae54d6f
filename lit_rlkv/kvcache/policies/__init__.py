"""Eviction policies, one small file each.

To add one here, subclass `Policy` in a file of its own and add it to `POLICIES`, the table of the names that
`cache.policy` takes. A policy in a package of your own also subclasses `Policy` and needs no entry:
`cache.policy=mypackage.policies.MyPolicy`, with that package in `trusted_modules`.
"""

from lit_rlkv.kvcache.policies.base import Policy, SlotView
from lit_rlkv.kvcache.policies.expected import Expected
from lit_rlkv.kvcache.policies.h2o import H2O
from lit_rlkv.kvcache.policies.keydiff import KeyDiff
from lit_rlkv.kvcache.policies.knorm import KNorm
from lit_rlkv.kvcache.policies.random import Random
from lit_rlkv.kvcache.policies.rkv import RKV
from lit_rlkv.kvcache.policies.snapkv import SnapKV
from lit_rlkv.kvcache.policies.streaming import Streaming
from lit_rlkv.kvcache.policies.tova import Tova
from lit_rlkv.trust import load_trusted_class

POLICIES: dict[str, type[Policy]] = {
    "streaming": Streaming,
    "h2o": H2O,
    "snapkv": SnapKV,
    "rkv": RKV,
    "tova": Tova,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "expected": Expected,
    "random": Random,
}


def load_policy_class(name: str) -> type[Policy]:
    """Return the eviction policy that a name means: one of POLICIES, or a class of a trusted module.

    Raises:
        ValueError: no such policy, its module is not trusted, or the class is not a Policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    if "." not in name:
        known = ", ".join(["dense", *POLICIES])
        raise ValueError(
            f"unknown cache policy {name!r}; choose one of {known}, or name a class of your own such as "
            "mypackage.policies.MyPolicy"
        )
    found = load_trusted_class(name)
    if not issubclass(found, Policy):
        raise ValueError(f"cache policy {name!r} must be a subclass of lit_rlkv.kvcache.policies.Policy")
    return found


__all__ = ["POLICIES", "Policy", "SlotView", "load_policy_class"]
