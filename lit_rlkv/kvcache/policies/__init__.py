"""Eviction policies, one small file each; a new one joins by standing in this table."""

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

__all__ = ["POLICIES", "Policy", "SlotView"]
