"""The numbers of an RL run: how responses are drawn, what the reference holds, how steps are cut."""

from dataclasses import dataclass

from lit_rlkv.objectives.kl import ESTIMATORS, LOSSES


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn, and scored."""

    n_prompts: int
    """Prompts per iteration; each gets `group_size` responses."""
    group_size: int
    max_new_tokens: int
    temperature: float
    max_rows: int | None = None
    """Most responses under way at a time; None: all at once."""
    cuda_graph: bool | None = None
    """True captures the decode step as a CUDA graph; None: on CUDA."""
    rows_per_pass: int | None = None
    """Most responses in one forward when the roles score them; None: all at once."""
    stacks_passes: bool = False
    """Different passes of one backbone run as one batch."""
    value_shadow: bool = True
    """True gives the critic the shadow view, False the dense view."""
    n_shards: int | None = None
    """Parts of the prompts that are sampled apart, each by random numbers of its own; None: one a rank. With
    a fixed number of them a run is the same on any number of ranks that divides it, but for float error."""


@dataclass(frozen=True)
class KLConfig:
    """The pull to the reference.

    Raises:
        ValueError: an estimator, a place or an adaptation that does not exist.
    """

    weight: float | int = 0.0
    place: str = "loss"
    """`loss`: a term of its own, with a gradient; `reward`: the reward of each action pays for it."""
    estimator: str = "k3"
    target: float | int | None = None
    """Nats per response (k1) that the weight is steered to (arXiv:1909.08593); None keeps the weight."""
    horizon: float | int = 10_000.0
    """Responses over which it is steered."""

    def __post_init__(self) -> None:
        if self.place not in ("loss", "reward"):
            raise ValueError(f"place={self.place!r} is unknown; choose loss or reward")
        known = LOSSES if self.place == "loss" else ESTIMATORS
        if self.estimator not in known:
            raise ValueError(
                f"estimator={self.estimator!r} does not serve in the {self.place}; "
                f"choose one of {', '.join(known)}"
            )
        if self.weight < 0:
            raise ValueError(f"weight={self.weight} rewards leaving the reference; give at least 0")
        if self.target is not None and (self.weight == 0 or self.target <= 0 or self.horizon <= 0):
            raise ValueError(
                f"target={self.target} steers weight={self.weight} over horizon={self.horizon}; "
                "all three must be more than 0"
            )


@dataclass(frozen=True)
class UpdateConfig:
    """How a rollout is turned into optimizer steps."""

    aggregation: str
    n_epochs: int = 1
    n_minibatches: int = 1
    """Optimizer steps per epoch over the rollout."""
    n_micro_batches: int = 1
    """Forward and backward passes per optimizer step: less memory, the same gradient."""
    mask_truncated: bool = False
    """Responses that were cut off count nothing in the policy's loss."""
    learner_parts: tuple[tuple[str, ...], ...] = (("policy",),)
    """Roles that learn together from a micro-batch, which comes once for each part."""
    critic_warmup: int = 0
    """First iterations, in which the critic alone learns: a policy would follow values that mean nothing."""
    warmup_part: tuple[str, ...] = ("value",)
    """Roles that learn in these iterations."""
