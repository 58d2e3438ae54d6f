"""The learner's log-probs over the sets that the sampler chose from are the sampler's, and over no others."""

import copy
from functools import cache
from itertools import combinations, product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.callbacks.gradient_variance import policy_outputs
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.models import replay_logps
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden, scatter_to_response
from lit_rlkv.rollout.sampling import keeps
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Rollout, SamplingMasks
from tests.hand_built import ARMS, make_datamodule, make_module, make_roles, shift
from tests.models_zoo import tiny_model
from tests.rollouts import TOLERANCE, gap, roll_out
from tests.tiers import pairwise

NUMBERS = {"top_k": 12, "top_p": 0.8, "min_p": 0.3}
COMBINATIONS = ["+".join(names) for n in (1, 2, 3) for names in combinations(NUMBERS, n)]
POLICIES = ["snapkv", "h2o", "dense"]
TEMPERATURES = [0.6, 1.0, 1.4]


def truncation_of(combination: str) -> dict[str, float]:
    return {name: NUMBERS[name] for name in combination.split("+")}


@cache
def sampled(combination: str, policy: str = "snapkv", temperature: float = 1.0) -> Rollout:
    options = {"temperature": temperature, "eos_token_id": 5} | truncation_of(combination)
    return roll_out("qwen3", policy, **options)


@pytest.mark.parametrize(
    ("combination", "policy", "temperature"), pairwise([*product(COMBINATIONS, POLICIES, TEMPERATURES)])
)
def test_replayed_log_probs_equal_rollout_log_probs(combination: str, policy: str, temperature: float):
    rollout = sampled(combination, policy, temperature)
    assert gap("qwen3", rollout) < TOLERANCE
    # Over the whole vocabulary, or at another temperature, the log-probs are others.
    assert gap("qwen3", rollout.with_record(sampling_masks=None)) > 1e-2
    assert gap("qwen3", rollout, temperature=temperature * 1.05) > 1e-2


def recomputed(rollout: Rollout, model: PreTrainedModel, combination: str, n_more: int = 0) -> Rollout:
    """The rollout with the sets that a learner would choose itself; `n_more` ranks larger ones."""
    with torch.no_grad():
        logits = model.get_output_embeddings()(response_hidden(model, rollout, shadow=True))
    sampling = Sampling(**truncation_of(combination))  # type: ignore[arg-type]
    ordered, ids = logits.sort()
    if sampling.top_k is not None:
        is_kept = torch.zeros_like(ordered, dtype=torch.bool)
        is_kept[:, -sampling.top_k :] = keeps(sampling, ordered[:, -sampling.top_k :])
    else:
        is_kept = keeps(sampling, ordered)
    counts = (is_kept.sum(1) + n_more).clamp(1, ordered.shape[1])
    place = torch.arange(ordered.shape[1])
    is_kept = place >= ordered.shape[1] - counts[:, None]
    record = scatter_to_response(rollout, counts.float()).int()
    return rollout.with_record(sampling_masks=SamplingMasks(record, ids[is_kept].int()))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_sets_that_are_one_rank_off_are_caught(combination: str):
    rollout, model = sampled(combination), tiny_model("qwen3")
    own = recomputed(rollout, model, combination)
    assert same_sets(own, rollout)
    assert gap("qwen3", own) < TOLERANCE
    for n_more in (1, -1):
        assert gap("qwen3", recomputed(rollout, model, combination, n_more)) > 100 * TOLERANCE


def same_sets(a: Rollout, b: Rollout) -> bool:
    return sets_of(a) == sets_of(b)


def sets_of(rollout: Rollout) -> list[set[int]]:
    masks = rollout.record.sampling_masks
    assert masks is not None
    counts = masks.counts[rollout.response_mask].tolist()
    return [set(ids.tolist()) for ids in torch.split(masks.token_ids, counts)]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_sets_that_a_learner_recomputes_after_an_update_are_caught(combination: str):
    rollout = sampled(combination)
    updated = copy.deepcopy(tiny_model("qwen3"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        over_the_record = replay_logps(updated, rollout)
        over_its_own = replay_logps(updated, recomputed(rollout, updated, combination))
    assert over_the_record.isfinite().all()
    assert not same_sets(recomputed(rollout, updated, combination), rollout)
    assert ((over_its_own - over_the_record).abs() > 100 * TOLERANCE).any()


def explicit_logps(model: PreTrainedModel, rollout: Rollout, *, shadow: bool) -> Tensor:
    """Log-probs by a loop over the response tokens, each renormalised over its own set."""
    with torch.no_grad():
        logits = model.get_output_embeddings()(response_hidden(model, rollout, shadow=shadow))
    tokens = rollout.input_ids[rollout.response_mask].tolist()
    values = []
    for row, token, kept in zip(logits, tokens, sets_of(rollout), strict=True):
        values.append(row[token] - row[sorted(kept)].logsumexp(0))
    return scatter_to_response(rollout, torch.stack(values))


@pytest.mark.parametrize("arm", ["naive", "tis", "mis", "sparse_rl", "shadow"])
def test_ratios_are_of_truncated_distributions_on_both_sides(arm: str):
    roles = shift(make_roles(needed=("policy", "reference")))
    data = make_datamodule(roles, ARMS[arm], rollout={"top_k": 10, "top_p": 0.9})
    experience = data.collect()
    rollout = experience.rollout
    # The first update: the ratio of the learner's log-probs to those of π_old is 1.
    for batch in data.splitter.minibatches(experience):
        module = make_module(roles, replays=ARMS[arm].replays)
        learner = policy_outputs(module, batch, shadow=module.replays).logps
        torch.testing.assert_close(learner, batch.old_logps, rtol=1e-4, atol=1e-5)
    scores = score_rollout(roles, rollout, {"policy": False}, temperature=1.0)
    with acting_as(roles, "policy") as backbone:
        dense = explicit_logps(backbone, rollout, shadow=False)
    torch.testing.assert_close(scores["policy"], dense, rtol=1e-4, atol=1e-5)
    if arm == "shadow":
        assert torch.equal(experience.old_logps, rollout.rollout_logps)
        return
    torch.testing.assert_close(experience.old_logps, dense, rtol=1e-4, atol=1e-5)
    expected = ARMS[arm].weight_fn(dense - rollout.rollout_logps, rollout.response_mask).weight
    torch.testing.assert_close(experience.weights.weight, expected, rtol=1e-3, atol=1e-3)
    n_weighed = (expected[rollout.response_mask] != 1).float().mean()
    assert n_weighed == 0 if arm == "naive" else n_weighed > 0.5


def test_the_reference_is_renormalised_over_the_samplers_sets():
    roles = shift(make_roles(needed=("policy", "reference")))
    rollout = make_datamodule(roles, rollout={"top_k": 10}).collect().rollout
    found = score_rollout(roles, rollout, {"reference": True}, temperature=1.0)["reference"]
    with acting_as(roles, "reference") as backbone:
        expected = explicit_logps(backbone, rollout, shadow=True)
        whole = replay_logps(backbone, rollout.with_record(sampling_masks=None))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - whole).abs().max() > 1e-2


@pytest.mark.parametrize("tokens_per_pass", [1, 40])
def test_micro_batches_of_any_size_have_the_same_gradient(tokens_per_pass: int):
    def gradients(size: int) -> dict[str, Tensor]:
        roles = shift(make_roles())
        data = make_datamodule(roles, rollout={"top_k": 10, "top_p": 0.9}, tokens_per_pass=size)
        module = make_module(roles, entropy_coef=0.1)
        for batch in data.splitter.minibatches(data.collect()):
            module.training_step(batch, 0)["loss"].backward()
        return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    whole, parts = gradients(10**6), gradients(tokens_per_pass)
    assert whole.keys() == parts.keys()
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-3, atol=1e-6)
