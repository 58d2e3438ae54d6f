"""CacheSpec: size and eviction policy of a KV cache."""

from collections.abc import Sequence
from dataclasses import fields, replace
from inspect import signature
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from lit_rlkv.kvcache.policies import POLICIES, WITHOUT_OPTIONS, load_policy_class
from lit_rlkv.kvcache.policy import Policy
from lit_rlkv.settings import DENSE, CacheSettings, cache_label, dataclass

BETA = 20
"""After PyramidKV (arXiv:2406.02069), the last layer chooses 1 / BETA of the mean number of keys."""


@dataclass(frozen=True)
class CacheSpec(CacheSettings):
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
        budget_profile: None gives each layer the same budget. "pyramid" gives lower layers more, linearly. A
            list, of a number for each layer with attention and without a window, gives them budgets in its
            proportions. `budget` is their mean, and the budget of layers with a window.
        dtype: "int8", "fp8" or "int4": keys and values are quantized when they arrive, to codes with
            scales for each token and KV head, and the quantized ones are read; see
            `lit_rlkv.kernels.quantization`. None: they stay in the dtype of the model.

    Raises:
        ValueError: the policy is unknown or does not take the options, a size is not an integer or too small,
            the budget is below sink + window + 1, `protect_prompt` is not a bool, or the profile
            or `dtype` is unknown.
    """

    policy: Any = "snapkv"  # a text, a class or an instance; `make_policy` checks it

    def __post_init__(self) -> None:
        self.make_policy()
        least = self.sink + self.window + 1
        if not self.is_dense and self.budget < least:
            raise ValueError(
                f"budget must be at least sink + window + 1 = {least}, got {self.budget}; raise the budget, "
                "or lower sink or window"
            )
        if self.budget_profile is not None and self.is_dense:
            raise ValueError(
                f"cache.budget_profile={self.budget_profile} divides a budget, and a dense cache has none; "
                "use null, or another policy"
            )

    @classmethod
    def of(cls, config: CacheSettings) -> "CacheSpec":
        """Return the spec with the settings of a config, which may have others beside them."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(CacheSettings)})

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
        """Name of this cache in tables and plots, and of its random numbers in evaluations."""
        return cache_label(self.policy_name, vars(self))

    @property
    def policy_name(self) -> str:
        """Name of the policy, without its module."""
        if isinstance(self.policy, str):
            return self.policy.rpartition(".")[2]
        return (self.policy if isinstance(self.policy, type) else type(self.policy)).__name__

    @property
    def is_trained(self) -> bool:
        """True if the policy has parameters, in the `kv_scorer` of a backbone."""
        policy = self.make_policy()
        return policy is not None and policy.is_trained

    @property
    def for_rollouts(self) -> "CacheSpec":
        """The cache of RL's rollouts: a trained policy draws its survivors there."""
        if not self.is_trained or isinstance(self.policy, Policy):
            return self
        return replace(self, policy_options={**self.policy_options, "samples": True})

    def check_draws(self) -> None:
        """Check that the evictions of rollouts can be trained.

        Raises:
            ValueError: their survivors are not drawn.
        """
        policy = self.for_rollouts.make_policy()
        if policy is None or not policy.is_trained or not policy.draws:
            raise ValueError(
                f"cache.policy={self.policy_name} must draw the survivors of rollouts to be trained, and its "
                "draws is false; give samples=True, or set draws to the samples that the constructor takes"
            )

    def explain_no_evictions(self, prefix: str, attention_mask: Bool[Tensor, "batch seq"]) -> str:
        """Return the warning for a rollout that lost no key; `prefix` is that of the settings' names."""
        longest, beside = int(attention_mask.sum(dim=1).max()), " after the prompt" * self.protect_prompt
        return (
            f"nothing was evicted in the first rollout, whose longest row has {longest} tokens: "
            f"{prefix}budget={self.budget} with {prefix}interval={self.interval} keeps all of them{beside}; "
            f"lower the budget, or use {prefix}policy=dense"
        )

    def n_slots(self, seq_len: int, n_prompt: int = 0, budget: int | None = None) -> int:
        """Return the slots per sequence, layer and KV head.

        Args:
            seq_len: tokens of the longest sequence.
            n_prompt: tokens of the longest prompt.
            budget: of the layer; None: the mean.
        """
        if self.is_dense:
            return seq_len
        size = (self.budget if budget is None else budget) + self.interval
        return min(size + (n_prompt if self.protect_prompt else 0), seq_len)

    def layer_budgets(self, n_layers: int) -> tuple[int, ...]:
        """Return the budgets of the layers without a window, in order; `budget` is their mean.

        Raises:
            ValueError: the profile has another number of layers, or a layer gets too few keys.
        """
        profile, least = self.budget_profile, self.sink + self.window + 1
        if profile is None:
            return (self.budget,) * n_layers
        if isinstance(profile, str) and n_layers > 0:
            step = (2 - 2 / BETA) / max(n_layers - 1, 1)
            shares = [1 / BETA + step * layer for layer in reversed(range(n_layers))]
            return tuple(least + size for size in _divided((self.budget - least) * n_layers, shares))
        numbers = () if isinstance(profile, str) else profile
        if n_layers == 0 or len(numbers) != n_layers:
            raise ValueError(
                f"cache.budget_profile={profile} must have a number for each layer without a window, and the "
                f"model has {n_layers}; change it, or use null"
            )
        found = _divided(self.budget * n_layers, numbers)
        if min(found) < least:
            raise ValueError(
                f"cache.budget_profile={list(numbers)} must leave each layer at least sink + window + 1 = "
                f"{least} keys, got {list(found)}; change it, or raise budget={self.budget}"
            )
        return found

    def make_policy(self) -> Policy | None:
        """Return the policy object; None if nothing is ever evicted."""
        if not isinstance(self.policy, str | Policy) and not callable(self.policy):
            raise ValueError(
                f"cache.policy must be one of {', '.join((DENSE, *POLICIES))}, or a policy of your own, "
                f"got {self.policy!r}; choose one"
            )
        takes_none = isinstance(self.policy, Policy) or self.policy in (DENSE, *WITHOUT_OPTIONS)
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
            takes = ", ".join(signature(make).parameters) or "no options"
            raise ValueError(f"cache.policy={self.policy}: {error}; it takes {takes}") from error


def _divided(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in the proportions of the shares that add up to `total`, by largest remainders."""
    exact = [total * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    order = sorted(range(len(shares)), key=lambda place: sizes[place] - exact[place])
    for place in order[: total - sum(sizes)]:
        sizes[place] += 1
    return tuple(sizes)
