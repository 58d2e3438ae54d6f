"""CacheSpec: what a KV cache keeps, and when it throws the rest away."""

from dataclasses import dataclass

from lit_rlkv.checks import is_whole
from lit_rlkv.kvcache.policies import POLICIES, Policy


@dataclass(frozen=True)
class CacheSpec:
    """A cache of `budget + interval` slots per sequence, layer and KV head.

    Whenever all slots are taken it is compacted to `budget` keys: the `sink` first and the `window` last
    tokens of the sequence, and the keys that `policy` scores highest. `window` is also how many of the latest
    queries the policies that look at queries see.

    Raises:
        ValueError: an unknown policy, a size that is no whole number or too small, or a sink and a window
            that leave nothing of the budget to choose.
    """

    policy: str = "snapkv"
    budget: int = 512
    interval: int = 128
    sink: int = 4
    window: int = 16

    def __post_init__(self) -> None:
        if self.policy != "dense" and self.policy not in POLICIES:
            known = ", ".join(["dense", *POLICIES])
            raise ValueError(f"unknown cache policy {self.policy!r}; choose one of {known}")
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
        return "dense" if self.is_dense else f"{self.policy} {self.budget}+{self.interval}"

    def n_slots(self, seq_len: int) -> int:
        """Slots allocated per sequence, layer and KV head when no sequence grows beyond `seq_len` tokens."""
        return seq_len if self.is_dense else self.budget + self.interval

    def make_policy(self) -> Policy | None:
        """The scorer of this cache; None when nothing is ever evicted."""
        return None if self.is_dense else POLICIES[self.policy]()
