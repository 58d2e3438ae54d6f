"""EvictingGRPOConfig and EvictingRLOOConfig: TRL's configs with the KV cache of rollouts."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig, RLOOConfig

from lit_rlkv.checks import Range, check_temperature
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.objectives.corrections import WeightFn, masked, truncated, unweighted
from lit_rlkv.settings import Sampling

CORRECTIONS: dict[str, WeightFn] = {
    "shadow": unweighted,
    "naive": unweighted,
    "tis": truncated,
    "mis": masked,
}
"""Weight functions by correction; with `shadow` the learner replays, with the others it is dense."""
DISTILLATIONS = ("none", "dense_student", "sparse_student")

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_vllm": ((False,), "vLLM does not record evictions"),
    "use_transformers_continuous_batching": ((False,), "a paged cache does not record evictions"),
    "cache_implementation": ((None,), "the cache is the one of cache_policy and cache_budget"),
    "repetition_penalty": ((1.0,), "the learner's log-probs have no penalty"),
    "neftune_noise_alpha": ((None, 0), "with noise the learner is another policy than the sampler"),
    "generation_kwargs": ((None, {}), "the sampler takes temperature, top_k, top_p and min_p only"),
}
"""Options of TRL that the rollout cannot follow: values that change nothing, and the reason."""


def _check_sampling(config: Any) -> None:
    """Check that a config of TRL asks for nothing that the rollout cannot do."""
    for name, (neutral, reason) in _NEUTRAL.items():
        if (given := getattr(config, name)) not in neutral:
            raise ValueError(f"{name} must be {neutral[0]}, got {given!r}: {reason}; leave it out")
    bound = "give the longest completion, in tokens"
    Range(least=1).check("max_completion_length", config.max_completion_length, int, bound)
    check_temperature("temperature", config.temperature, is_greedy_allowed=False)
    config.sampling()


@dataclass
class EvictingConfig:
    """The KV cache of rollouts, and the learner's view of it: fields that both configs add to TRL's."""

    corrections: ClassVar[tuple[str, ...]]
    """Corrections that the trainer's loss can take."""

    cache_policy: str = field(default="snapkv", metadata={"help": "Eviction policy; dense evicts nothing."})
    cache_budget: int = field(default=512, metadata={"help": "Keys left after a compaction."})
    cache_interval: int = field(default=128, metadata={"help": "Tokens decoded between two compactions."})
    cache_sink: int = field(default=4, metadata={"help": "First tokens that are never evicted."})
    cache_window: int = field(default=16, metadata={"help": "Latest tokens that are never evicted."})
    cache_protect_prompt: bool = field(
        default=False, metadata={"help": "Never evict keys of the prompt, nor count them in the budget."}
    )
    cache_dtype: str | None = field(
        default=None,
        metadata={"help": "int8, fp8 or int4 quantizes keys and values; None: the model's dtype."},
    )
    correction: str = field(default="shadow", metadata={"help": "shadow replays the evictions."})
    replay_routing: bool = field(
        default=False, metadata={"help": "The learner takes the experts of the sampler's routers."}
    )

    def check(self) -> None:
        """Check the fields above, and those of TRL that tell how to sample.

        Raises:
            ValueError: a field is invalid, or asks for what the rollout cannot do.
        """
        self.cache_spec()
        if self.correction == "sparse_rl":
            raise ValueError(
                "correction='sparse_rl' counts fewer tokens in the loss's denominator, which TRL's losses do "
                f"not take; choose one of {', '.join(self.corrections)}"
            )
        self.check_choice("correction", self.corrections)
        if not isinstance(self.replay_routing, bool):
            raise ValueError(f"replay_routing must be True or False, got {self.replay_routing!r}; give one")
        _check_sampling(self)

    def check_choice(self, name: str, known: tuple[str, ...]) -> None:
        """Check that a field is one of the known words."""
        if getattr(self, name) not in known:
            raise ValueError(
                f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}; choose one"
            )

    def sampling(self) -> Sampling:
        """Return how tokens are drawn, by TRL's own fields, of which `top_k=0` keeps all tokens.

        Raises:
            ValueError: a number is out of its range.
        """
        given: Any = self  # the fields are of TRL's config
        return Sampling(given.temperature, given.top_k or None, given.top_p, given.min_p)

    def cache_spec(self) -> CacheSpec:
        """Return the cache of rollouts.

        Raises:
            ValueError: it is invalid, or its policy is trained, which TRL's trainers do not.
        """
        names = ("policy", "budget", "interval", "sink", "window", "protect_prompt", "dtype")
        try:
            spec = CacheSpec(**{name: getattr(self, f"cache_{name}") for name in names})
        except ValueError as error:  # by the name of the field here
            is_of_field = str(error).split()[0] in names
            raise ValueError(f"cache_{error}" if is_of_field else str(error)) from None
        if spec.is_trained:
            raise ValueError(
                f"cache_policy={self.cache_policy!r} has parameters, which TRL's trainer does not train; use "
                "python -m lit_rlkv.fit, or another policy"
            )
        return spec


@dataclass
class EvictingGRPOConfig(EvictingConfig, GRPOConfig):  # type: ignore[misc]
    """TRL's GRPOConfig, with the KV cache of rollouts, the correction and the distillation.

    Args:
        cache_policy: eviction policy, one of `lit_rlkv.kvcache.POLICIES`, or "dense" to evict nothing.
        cache_budget: keys left after a compaction, for each sequence, layer and KV head.
        cache_interval: tokens decoded between two compactions.
        cache_sink: first tokens of a sequence that are never evicted.
        cache_window: latest tokens that are never evicted.
        cache_protect_prompt: never evict a key of the prompt; `cache_budget` then counts the others.
        cache_dtype: "int8", "fp8" or "int4" quantizes keys and values, which a learner that replays repeats.
        correction: "shadow": the learner replays the evictions of the rollout. Otherwise it sees every key,
            without a correction ("naive"), or with TRL's per-token loss times the importance weight min(ρ, 2)
            ("tis") or ρ inside [0.5, 2] and 0 outside ("mis"), ρ = π_old / sampler.
        replay_routing: for mixtures of experts, the learner and the reference take the experts that the
            sampler's routers chose (arXiv:2510.11370).
        distillation: "dense_student" adds KL(π_dense ‖ sg π_shadow) to the loss, "sparse_student"
            KL(sg reference_dense ‖ π_shadow) (arXiv:2605.06850); "none": neither.
        distillation_weight: weight of the KL, in nats per completion token.

    With `top_k`, `top_p` and `min_p` all distributions at a completion token, those of the policy, the
    reference and the distillation, are renormalised over the tokens that the sampler chose from.

    Raises:
        ValueError: a field is invalid, or an option of TRL asks for what the rollout cannot do.
    """

    corrections = tuple(CORRECTIONS)

    distillation: str = field(
        default="none", metadata={"help": "One of none, dense_student, sparse_student."}
    )
    distillation_weight: float = field(default=0.1, metadata={"help": "Weight of the distillation's KL."})

    def __post_init__(self) -> None:
        self.check()
        self.check_choice("distillation", DISTILLATIONS)
        off = "raise it, or set distillation='none'"
        Range(above=0).check("distillation_weight", self.distillation_weight, hint=off)
        super().__post_init__()


@dataclass
class EvictingRLOOConfig(EvictingConfig, RLOOConfig):  # type: ignore[misc]
    """TRL's RLOOConfig, with the KV cache of rollouts and the correction.

    Args:
        cache_policy: eviction policy; this, the other fields of the cache and `replay_routing` as in
            `EvictingGRPOConfig`, and so are `top_k`, `top_p` and `min_p`.
        correction: "shadow" or "naive". RLOO's loss has one ratio for a sequence, where the per-token weights
            of "tis" and "mis" have no place.

    Raises:
        ValueError: a field is invalid, or an option of TRL asks for what the rollout cannot do.
    """

    corrections = ("shadow", "naive")

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()
