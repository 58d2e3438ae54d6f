"""KV caches of fixed size, with eviction policies and a record of every eviction."""

from lit_rlkv.kvcache.cache import SlotCache
from lit_rlkv.kvcache.policies import POLICIES
from lit_rlkv.kvcache.spec import CacheSpec

__all__ = ["POLICIES", "CacheSpec", "SlotCache"]
