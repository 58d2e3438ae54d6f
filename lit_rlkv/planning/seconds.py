"""Seconds of a rollout and of an update by a roofline, with the utilisation that one H100 reached.

The factors are fitted to one model of 1.5B parameters on that card (benchmarks/results/gpu.jsonl); how far
other cards and models are from them was not measured. Decoding reads the weights and each row's keys once a
step; the rest is arithmetic.
"""

from dataclasses import dataclass

from lit_rlkv.planning.cards import Card

READ = 0.81
"""Share of the bandwidth that decoding reaches beside its launches."""
LAUNCH_S, COMPILED_LAUNCH_S = 0.147e-3, 0.076e-3
"""Seconds of a layer in a decode step, and with `rollout.compile_layers`."""
PRODUCTS, SHADOW_ATTENTION, DENSE_ATTENTION = 0.32, 0.14, 0.31
"""Shares of the bfloat16 products that linear layers, and the learner's attention under a budget and with all
keys, reach."""
ATTENTION_FORWARDS = 3.5
"""Forwards that forward and backward pass of attention take together."""


@dataclass(frozen=True)
class Work:
    """The work of a model on sequences of one length, under one cache."""

    weight_bytes: int
    """Bytes of the matrices, which a decode step reads."""
    n_products: int
    """Weights that a token is multiplied by."""
    n_layers: int
    key_bytes: float
    """Keys and values that a row reads in a decode step, in the mean over its response."""
    attention_flops: float
    """Flops of attention in one forward of a whole sequence."""
    is_dense: bool
    trains_all: bool
    recomputes: bool
    n_scorings: int
    """Forwards over a response that score it before the update."""
    n_learners: int
    """Passes of an epoch over a response: of the policy, and of a critic."""


def mean_keys(n_prompt: int, n_tokens: int, level: float | None) -> float:
    """Return the keys of a head that a decode step reads, in the mean over a response.

    Args:
        level: keys that a head holds in the mean once it evicts; None: it keeps all.
    """
    if level is None:
        return n_prompt + n_tokens / 2
    n_growing = min(max(level - n_prompt, 0), n_tokens)
    grown = min(n_prompt, level) + n_growing / 2
    return (n_growing * grown + (n_tokens - n_growing) * level) / n_tokens


def rollout_seconds(
    work: Work, card: Card, n_rows: int, n_responses: int, prompt: int, n_tokens: int, *, is_compiled: bool
) -> float:
    """Return the seconds in which responses of `n_tokens` tokens are decoded, `n_rows` at a time.

    Args:
        prompt: tokens of all prompts.
    """
    assert card.bandwidth is not None
    assert card.flops is not None
    launches = work.n_layers * (COMPILED_LAUNCH_S if is_compiled else LAUNCH_S)
    step = (work.weight_bytes + n_rows * work.key_bytes) / (READ * card.bandwidth) + launches
    prefill = 2 * work.n_products * prompt / (PRODUCTS * card.flops)
    return step * n_tokens * -(-n_responses // n_rows) + prefill


def update_seconds(work: Work, card: Card, n_responses: int, n_columns: int, n_epochs: int) -> float:
    """Return the seconds of scoring, and of all passes of the learners over the responses.

    Args:
        n_columns: tokens of all responses, and of their prompts once for each group.
    """
    assert card.flops is not None
    n_passes = work.n_learners * n_epochs
    of_weight = n_passes * ((6 if work.trains_all else 4) + 2 * work.recomputes) + 2 * work.n_scorings
    forwards = n_passes * (ATTENTION_FORWARDS + work.recomputes) + work.n_scorings
    speed = DENSE_ATTENTION if work.is_dense else SHADOW_ATTENTION
    attention = forwards * work.attention_flops * n_responses / (speed * card.flops)
    return of_weight * work.n_products * n_columns / (PRODUCTS * card.flops) + attention
