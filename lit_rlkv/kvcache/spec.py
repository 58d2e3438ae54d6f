"""CacheSpec: what a KV cache keeps, and when it throws the rest away."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_rlkv.checks import is_whole
from lit_rlkv.kvcache.policies import Policy, load_policy_class


@dataclass(frozen=True)
class CacheSpec:
    """A cache of `budget + interval` slots per sequence, layer and KV head.

    Whenever all slots are taken it is compacted to `budget` keys: the `sink` first and the `window` last
    tokens of the sequence, and the keys that `policy` scores highest. `window` is also how many of the latest
    queries the policies that look at queries see.

    Args:
        policy: the name of an eviction policy, the dotted name of a class in a trusted module
            (`lit_rlkv.trust`), or in Python also a subclass of `Policy` or an instance of one.
        policy_options: arguments of the policy's constructor.

    Raises:
        ValueError: an unknown policy or options that it does not take, a size that is no whole number or too
            small, or a sink and a window that leave nothing of the budget to choose.
    """

    policy: str | type[Policy] | Policy = "snapkv"
    budget: int = 512
    interval: int = 128
    sink: int = 4
    window: int = 16
    policy_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy_options", dict(self.policy_options or {}))
        self.make_policy()
        for name, least in {"budget": 1, "interval": 1, "sink": 0, "window": 1}.items():
            value = getattr(self, name)
            if not is_whole(value):
                raise ValueError(
                    f"cache.{name}={value!r} is not an integer; it counts keys, so give a whole number"
                )
            if value < least:
                raise ValueError(f"cache.{name}={value} is below {least}; raise it to at least {least}")
        if not self.is_dense and self.sink + self.window >= self.budget:
            raise ValueError(
                f"sink={self.sink} + window={self.window} leave no slot to choose in budget={self.budget}; "
                "raise budget or lower them"
            )

    @classmethod
    def dense(cls) -> "CacheSpec":
        """The cache that keeps everything, through the same interface."""
        return cls(policy="dense")

    @property
    def is_dense(self) -> bool:
        """Whether nothing is ever evicted; the sizes then mean nothing."""
        return self.policy == "dense"

    @property
    def label(self) -> str:
        """What tables and plots call this cache."""
        return "dense" if self.is_dense else f"{self.policy_name} {self.budget}+{self.interval}"

    @property
    def policy_name(self) -> str:
        """The name of the policy, without the module of a user's own."""
        if isinstance(self.policy, str):
            return self.policy.rpartition(".")[2]
        return (self.policy if isinstance(self.policy, type) else type(self.policy)).__name__

    def n_slots(self, seq_len: int) -> int:
        """Slots allocated per sequence, layer and KV head when no sequence grows beyond `seq_len` tokens."""
        return seq_len if self.is_dense else self.budget + self.interval

    def make_policy(self) -> Policy | None:
        """The scorer of this cache; None when nothing is ever evicted."""
        if self.is_dense or isinstance(self.policy, Policy):
            if self.policy_options:
                raise ValueError(
                    f"cache.policy_options={self.policy_options} have no effect on {self.policy_name}; leave "
                    "them out"
                )
            return self.policy if isinstance(self.policy, Policy) else None
        make = load_policy_class(self.policy) if isinstance(self.policy, str) else self.policy
        try:
            return make(**self.policy_options)
        except TypeError as error:
            raise ValueError(f"cache.policy={self.policy}: {error}") from error
