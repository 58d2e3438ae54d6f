"""Given texts under a cache have the log-probs and the record that they would have as samples."""

from copy import deepcopy

import pytest
import torch

from lit_rlkv import CacheSpec, score_tokens
from tests.models_zoo import PAD, VOCAB, tiny_model
from tests.rollouts import LENS, gap, gaps, roll_out, spec_of

N = max(LENS)


def scored(rollout, cache, mask=None, model="llama", **options):
    mask = rollout.response_mask[:, N:] if mask is None else mask
    prompts = rollout.input_ids[:, :N], rollout.attention_mask[:, :N]
    return score_tokens(tiny_model(model), *prompts, rollout.input_ids[:, N:], mask, cache=cache, **options)


@pytest.mark.parametrize(
    "cache",
    [
        *(spec_of(policy) for policy in ("h2o", "snapkv", "streaming")),
        CacheSpec.dense(),
        spec_of("h2o", dtype="int8"),
        spec_of("snapkv", protect_prompt=True),
    ],
    ids=lambda cache: cache.label,
)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 4, "temperature": 0.7}], ids=["whole", "chunks"])
def test_a_sampled_text_gets_its_own_logps_and_record(cache, options):
    rollout = roll_out(cache=cache, **options)
    found = scored(rollout, cache, **options)
    assert torch.equal(found.rollout_logps, rollout.rollout_logps)
    assert torch.equal(found.evicted_at, rollout.evicted_at)
    assert torch.equal(found.input_ids, rollout.input_ids)
    assert found.temperature == rollout.temperature
    assert gap("llama", found) < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_layers_with_windows_are_scored_and_replayed(family):
    rollout = roll_out(family, "h2o")
    assert torch.equal(scored(rollout, spec_of("h2o"), model=family).rollout_logps, rollout.rollout_logps)


def test_a_model_in_float64_scores_a_text_too():
    rollout, cache = roll_out(cache="h2o"), spec_of("h2o")
    prompts = rollout.input_ids[:, :N], rollout.attention_mask[:, :N]
    wide = deepcopy(tiny_model()).double()
    mask = rollout.response_mask[:, N:]
    found = score_tokens(wide, *prompts, rollout.input_ids[:, N:], mask, cache=cache)
    torch.testing.assert_close(found.rollout_logps, rollout.rollout_logps, atol=1e-4, rtol=0)


def test_texts_of_different_lengths_end_by_themselves():
    rollout, lengths = roll_out(cache="h2o"), torch.tensor([18, 5, 1, 9])
    mask = torch.arange(18) < lengths[:, None]
    found = scored(rollout, spec_of("h2o"), mask)
    assert torch.equal(found.response_mask.sum(dim=1), lengths)
    assert torch.equal(found.rollout_logps[:, N:], rollout.rollout_logps[:, N:].masked_fill(~mask, 0.0))
    assert gap("llama", found) < 1e-4
    assert torch.equal(found.attention_mask[:, N:], mask)


def test_another_cache_gives_other_logps_and_all_keys_those_of_one_forward():
    rollout = roll_out(cache="h2o")
    evicting = scored(rollout, spec_of("streaming"))
    assert (evicting.rollout_logps - rollout.rollout_logps).abs().max() > 1e-2
    dense = scored(rollout, CacheSpec.dense())
    assert gaps("llama", dense, shadow=False).max() < 1e-4


def test_logits_of_each_step_are_shown():
    rollout, shown = roll_out(cache="h2o"), []
    found = scored(rollout, spec_of("h2o"), on_logits=shown.append)
    logps = torch.stack(shown, dim=1).log_softmax(-1).gather(2, rollout.input_ids[:, N:, None])[..., 0]
    torch.testing.assert_close(logps, found.rollout_logps[:, N:])


@pytest.mark.parametrize(
    ("response", "mask", "reason"),
    [
        (torch.ones(1, 3).long(), None, r"\(1, 3\) for 2 prompts"),
        (torch.ones(2, 3), None, "must be torch.long"),
        (torch.ones(2, 3).long(), torch.tensor([[1, 0, 1], [1, 1, 1]]), "right-padded"),
        (torch.ones(2, 3).long(), torch.tensor([[0, 0, 0], [1, 1, 1]]), "right-padded"),
        (torch.full((2, 3), VOCAB), None, f"token {VOCAB}"),
        (torch.ones(2, 0).long(), None, "max_new_tokens must be"),
    ],
)
def test_responses_that_fit_no_prompts_are_refused(response, mask, reason):
    prompts = torch.full((2, 2), PAD + 1)
    with pytest.raises(ValueError, match=reason):
        score_tokens(tiny_model(), prompts, torch.ones_like(prompts), response, mask, cache=CacheSpec.dense())


def test_greedy_is_no_distribution():
    prompts = torch.ones(1, 2).long()
    with pytest.raises(ValueError, match="temperature"):
        score_tokens(tiny_model(), prompts, prompts, prompts, cache=CacheSpec.dense(), temperature=0.0)
