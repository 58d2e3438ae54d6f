"""The policy's whole distributions under two views of one rollout: what the sampler saw, and every key."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.checks import is_count
from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.kernels.token_logps import in_chunks, policy_kl, tempered
from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS
from lit_rlkv.models.backbone import head_logits, text_config
from lit_rlkv.models.replay import response_hidden, scatter_to_response
from lit_rlkv.types import NEVER, Rollout

MAX_TOKENS = 2**16
"""Tokens in one forward of a diagnostic where nothing else is said, to fit beside what a run itself holds."""


@torch.no_grad()
def view_overlap(
    model: PreTrainedModel, rollout: Rollout, temperature: float, max_logits: int = MAX_CHUNK_LOGITS
) -> Float[Tensor, "batch seq"]:
    """Σ_v min(μ_v, π_v) at each action, 0 elsewhere: μ the policy in the sampler's view, π in the dense one.

    1 where eviction changed nothing, 0 where the two share no token: it is 1 minus their total variation
    distance. Its low percentiles are reported to announce a collapse that the mean hides (arXiv:2606.08446).

    Args:
        max_logits: most logits of one view that are held at a time.
    """

    def of_chunk(*views: Tensor) -> tuple[Tensor]:
        probs = [tempered(head_logits(model, hidden), temperature).softmax(dim=-1) for hidden in views]
        return (torch.minimum(*probs).sum(dim=-1),)

    hidden = [response_hidden(model, rollout, shadow=shadow) for shadow in (True, False)]
    size = max(max_logits // text_config(model).vocab_size, 1)
    (overlap,) = in_chunks(of_chunk, *hidden, size=size, is_linearised=False)
    return scatter_to_response(rollout, overlap)


@torch.no_grad()
def layer_kls(
    model: PreTrainedModel, rollout: Rollout, temperature: float
) -> Float[Tensor, "layer_or_all action"]:
    """KL(π_layer ‖ π_dense) at each action, in nats over the whole vocabulary; the last row is of all layers.

    π_layer is the policy where the keys that this layer evicted are dead to it, and every other layer sees
    all keys: layer + 2 forwards. The effects of layers do not add up, so the whole table has its own row.
    """
    # By the same path as the others, so that a layer without evictions differs by nothing at all.
    dense = response_hidden(model, _with_evictions_of(rollout, []), shadow=True)
    head = partial(head_logits, model)

    def kl(view: Rollout) -> Tensor:
        hidden = response_hidden(model, view, shadow=True)
        return policy_kl(hidden, dense, head, head, temperature, text_config(model).vocab_size)

    alone = [kl(_with_evictions_of(rollout, [layer])) for layer in range(rollout.evicted_at.shape[1])]
    return torch.stack([*alone, kl(rollout)])


def _with_evictions_of(rollout: Rollout, layers: list[int]) -> Rollout:
    """The rollout as if these layers alone had evicted what they did."""
    evicted_at = torch.full_like(rollout.evicted_at, NEVER)
    evicted_at[:, layers] = rollout.evicted_at[:, layers]
    return replace(rollout, evicted_at=evicted_at)


def nothing_died(rollout: Rollout) -> bool:
    """Whether no query lost a key: both views of such a rollout are the same, and need no forward to tell."""
    is_kept = rollout.evicted_at >= rollout.input_ids.shape[1]
    return bool((is_kept | ~rollout.attention_mask[:, None, None]).all())


def spread_rows(rollout: Rollout, n_rows: int, ranks: Ranks = SINGLE_PROCESS) -> Int[Tensor, " row"]:
    """`n_rows` of its responses, evenly from the first to the last; all where there are fewer.

    Args:
        ranks: whose responses are chosen from together; the rows of this one's rollout, perhaps none.
    """
    mine = ranks.mine(len(rollout.input_ids))
    n = len(rollout.input_ids) * ranks.size
    rows = torch.linspace(0, n - 1, min(n_rows, n), dtype=torch.float64).round().long()
    rows = rows[(mine.start <= rows) & (rows < mine.stop)] - mine.start
    return rows.to(rollout.input_ids.device)


def check_rows(name: str, n_rows: int, rows_per_pass: int | None) -> None:
    """Refuse to measure on nothing.

    Raises:
        ValueError: naming the option of the diagnostic.
    """
    for option, value in {"n_rows": n_rows, "rows_per_pass": rows_per_pass}.items():
        if value is None and option == "rows_per_pass":
            continue
        if not is_count(value):
            raise ValueError(
                f"diagnostics.{name}.{option}={value} measures nothing; give a whole number of at least 1"
            )


def rows_in_pass(rollout: Rollout, rows_per_pass: int | None) -> int:
    """How many responses one forward takes: `rows_per_pass`, or what makes up MAX_TOKENS."""
    return rows_per_pass or max(MAX_TOKENS // rollout.input_ids.shape[1], 1)


def in_passes(rollout: Rollout, rows_per_pass: int | None) -> Iterator[Rollout]:
    """The rollout in pieces that one forward takes."""
    size = rows_in_pass(rollout, rows_per_pass)
    for start in range(0, len(rollout.input_ids), size):
        yield rollout.rows(slice(start, start + size))
