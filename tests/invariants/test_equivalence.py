"""Invariants 1 and 4: a budget that is never reached changes nothing, nor does how a batch is arranged."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.experience.sample import widened
from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.models import replay_logps
from lit_rlkv.objectives.clipped import clipped_surrogate
from lit_rlkv.types import Rollout
from tests.models_zoo import FAMILIES, PAD, ragged_prompts, tiny_model
from tests.rollouts import LENS, roll_out, spec_of

N_NEW = 16
ENOUGH = max(LENS) + N_NEW


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_from_our_cache_is_that_of_transformers(family: str):
    input_ids, is_prompt = ragged_prompts(LENS)
    theirs = tiny_model(family).generate(
        input_ids, attention_mask=is_prompt.long(), max_new_tokens=N_NEW, do_sample=False, pad_token_id=PAD
    )

    def ours(cache: CacheSpec) -> Tensor:
        return roll_out(family, cache, max_new_tokens=N_NEW, temperature=0.0).input_ids

    assert torch.equal(ours(spec_of("dense")), theirs)
    assert torch.equal(ours(spec_of("snapkv", budget=ENOUGH)), theirs)
    assert not torch.equal(ours(spec_of("snapkv")), theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_that_is_never_exceeded_samples_as_a_dense_cache(policy: str):
    caches = (spec_of("dense"), spec_of(policy, budget=ENOUGH), spec_of(policy))
    dense, enough, sparse = (roll_out("qwen3", cache, max_new_tokens=N_NEW) for cache in caches)
    assert torch.equal(enough.input_ids, dense.input_ids)
    assert torch.equal(enough.evicted_at, dense.evicted_at)
    torch.testing.assert_close(enough.rollout_logps, dense.rollout_logps, rtol=0, atol=1e-5)
    assert not torch.equal(sparse.input_ids, dense.input_ids)


@cache
def compressed() -> Rollout:
    """Rows of different response lengths."""
    rollout = roll_out("qwen3", "h2o", max_new_tokens=N_NEW, eos_token_id=5)
    assert len(set(rollout.response_mask.sum(1).tolist())) > 1
    return rollout


def pad(rollout: Rollout, n_left: int, n_right: int) -> Rollout:
    """The same sequences with more padding around them."""
    return widened(rollout, rollout.input_ids.shape[1] + n_left + n_right, PAD, n_left)


def loss_of(rollout: Rollout, n_response_tokens: Tensor) -> Tensor:
    """The clipped surrogate on made-up advantages, per action of the whole step."""
    logps = replay_logps(tiny_model("qwen3"), rollout)
    # The advantage follows from the prompt's last token, so that it moves with its row.
    advantages = torch.where(rollout.response_mask, rollout.input_ids.sum(1, keepdim=True) % 7 - 3.0, 0.0)
    gain = clipped_surrogate(logps - rollout.rollout_logps + 0.1, advantages, 0.2, 0.2).gain
    return -gain.masked_fill(~rollout.response_mask, 0.0).sum() / n_response_tokens


def loss_and_gradients(parts: list[Rollout], n_response_tokens: Callable[[Rollout], Tensor]) -> list[Tensor]:
    parameters = [one for one in tiny_model("qwen3").parameters() if one.requires_grad]
    losses = [loss_of(part, n_response_tokens(part)) for part in parts]
    gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
    return [torch.stack(losses).detach().sum(), *(sum(g) for g in zip(*gradients, strict=True))]


def of_the_whole_step(part: Rollout) -> Tensor:
    return compressed().response_mask.sum()


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest difference of losses and gradients, relative to the largest entry of each tensor."""
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


ARRANGEMENTS: dict[str, Callable[[Rollout], list[Rollout]]] = {
    "more padding": lambda rollout: [pad(rollout, n_left=3, n_right=2)],
    "another order": lambda rollout: [rollout.rows(torch.tensor([2, 0, 3, 1]))],
    "micro-batches of one": lambda rollout: [rollout.rows(slice(i, i + 1)) for i in range(4)],
    "uneven micro-batches": lambda rollout: [rollout.rows(slice(0, 3)), rollout.rows(slice(3, 4))],
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_arrangement_of_a_batch_changes_neither_loss_nor_gradients(arrangement: str):
    expected = loss_and_gradients([compressed()], of_the_whole_step)
    actual = loss_and_gradients(ARRANGEMENTS[arrangement](compressed()), of_the_whole_step)
    assert largest_difference(actual, expected) < 1e-4


def test_the_comparison_catches_denominators_of_the_micro_batch():
    expected = loss_and_gradients([compressed()], of_the_whole_step)
    parts = ARRANGEMENTS["uneven micro-batches"](compressed())
    own_counts = loss_and_gradients(parts, lambda part: 2 * part.response_mask.sum())
    assert largest_difference(own_counts, expected) > 1e-2


def test_the_comparison_catches_evictions_that_did_not_move_with_the_padding():
    expected = loss_and_gradients([compressed()], of_the_whole_step)
    padded = pad(compressed(), n_left=3, n_right=2)
    stale = padded.with_record(evicted_at=F.pad(compressed().evicted_at, (3, 2)))
    assert largest_difference(loss_and_gradients([stale], of_the_whole_step), expected) > 1e-2
