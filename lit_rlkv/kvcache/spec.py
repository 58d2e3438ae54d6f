"""CacheSpec: size and eviction policy of a KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_rlkv.checks import Range
from lit_rlkv.kernels.rounding import ROUNDINGS
from lit_rlkv.kvcache.policies import DENSE, POLICIES, Policy, load_policy_class


@dataclass(frozen=True)
class CacheSpec:
    """A KV cache of `budget + interval` slots per sequence, layer and KV head, beside protected prompts.

    After every chunk of given tokens, and every `interval` sampled tokens from there, a sequence with more
    than `budget` keys is compacted to it: the `sink` first and the `window` last tokens of the sequence, and
    the keys that `policy` scores highest. Policies that look at queries see the latest `window` of them.

    Args:
        policy: a name in `POLICIES`, "dense" to keep everything, or the dotted name of a class in a trusted
            module (`lit_rlkv.trust`); in Python also a subclass of `Policy` or an instance of one.
        policy_options: arguments of the policy's constructor.
        budget: keys left after a compaction.
        interval: tokens decoded between two compactions.
        sink: first tokens of a sequence that are never evicted.
        window: latest tokens that are never evicted.
        protect_prompt: never evict a key of the prompt, and let `budget` count the keys after it alone. Each
            row then has `budget + interval` slots and one for each token of the longest prompt. Tokens that
            are given in the middle of a response are no prompt.
        dtype: "int8", "fp8" or "int4": keys and values are rounded when they arrive, to codes with a scale
            for each token and KV head, and the rounded ones are read; see `lit_rlkv.kernels.rounding`.
            None: they stay in the dtype of the model.

    Raises:
        ValueError: the policy is unknown or does not take the options, a size is not an integer or too small,
            the budget is below sink + window + 1, `protect_prompt` is not a bool, or `dtype` is unknown.
    """

    policy: str | type[Policy] | Policy = "snapkv"
    budget: int = 512
    interval: int = 128
    sink: int = 4
    window: int = 16
    protect_prompt: bool = False
    policy_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy_options", dict(self.policy_options or {}))
        self.make_policy()
        for name, least in {"budget": 1, "interval": 1, "sink": 0, "window": 1}.items():
            Range(least=least).check(f"cache.{name}", getattr(self, name), int)
        least = self.sink + self.window + 1
        if not self.is_dense and self.budget < least:
            raise ValueError(
                f"budget must be at least sink + window + 1 = {least}, got {self.budget}; raise the budget, "
                "or lower sink or window"
            )
        if not isinstance(self.protect_prompt, bool):
            raise ValueError(
                f"cache.protect_prompt must be true or false, got {self.protect_prompt!r}; choose one"
            )
        if self.dtype is not None and self.dtype not in ROUNDINGS:
            raise ValueError(
                f"cache.dtype must be one of {', '.join(ROUNDINGS)}, or null for the model's own, got "
                f"{self.dtype!r}; choose one"
            )

    @classmethod
    def dense(cls) -> "CacheSpec":
        """Return the spec of a cache that evicts nothing."""
        return cls(policy=DENSE)

    @property
    def is_dense(self) -> bool:
        """True if nothing is ever evicted; the sizes are then ignored."""
        return self.policy == DENSE

    @property
    def is_exact(self) -> bool:
        """True if every query sees all keys and values as they are, as in a dense learner."""
        return self.is_dense and self.dtype is None

    @property
    def label(self) -> str:
        """Name of this cache in tables and plots."""
        dtype = "" if self.dtype is None else f" {self.dtype}"
        if self.is_dense:
            return f"dense{dtype}"
        prompt = "prompt+" if self.protect_prompt else ""
        return f"{self.policy_name} {prompt}{self.budget}+{self.interval}{dtype}"

    @property
    def policy_name(self) -> str:
        """Name of the policy, without its module."""
        if isinstance(self.policy, str):
            return self.policy.rpartition(".")[2]
        return (self.policy if isinstance(self.policy, type) else type(self.policy)).__name__

    def n_slots(self, seq_len: int, n_prompt: int = 0) -> int:
        """Return the slots per sequence, layer and KV head.

        Args:
            seq_len: tokens of the longest sequence.
            n_prompt: tokens of the longest prompt.
        """
        if self.is_dense:
            return seq_len
        return min(self.budget + self.interval + (n_prompt if self.protect_prompt else 0), seq_len)

    def make_policy(self) -> Policy | None:
        """Return the policy object; None if nothing is ever evicted."""
        if not isinstance(self.policy, str | Policy) and not callable(self.policy):
            raise ValueError(
                f"cache.policy must be one of {', '.join((DENSE, *POLICIES))}, or a policy of your own, "
                f"got {self.policy!r}; choose one"
            )
        takes_none = isinstance(self.policy, Policy) or self.policy in (DENSE, *POLICIES)
        if takes_none and self.policy_options:
            raise ValueError(
                f"policy_options={self.policy_options} have no effect on {self.policy_name}; leave them out"
            )
        if self.is_dense or isinstance(self.policy, Policy):
            return self.policy if isinstance(self.policy, Policy) else None
        make = load_policy_class(self.policy) if isinstance(self.policy, str) else self.policy
        try:
            return make(**self.policy_options)
        except TypeError as error:
            raise ValueError(f"cache.policy={self.policy}: {error}") from error
