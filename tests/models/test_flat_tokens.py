"""The learner's forward over each different token once equals the forward over all rows, and costs less."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.models.flat_tokens import flat_tokens
from lit_rlkv.models.learner import learner_states
from lit_rlkv.models.packing import packed
from lit_rlkv.models.preparation import prepare_backbone
from lit_rlkv.models.replay import prompt_columns
from lit_rlkv.rollout import generate
from lit_rlkv.types import NEVER, Record
from tests.hand_built import make_model, replayed

# Two prompts are equal up to their padding, and the third is longer than the budget.
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [0, 5, 6, 7, 8], [9, 5, 6, 7, 8]])
IS_PROMPT = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
SPEC = CacheSpec(policy="random", budget=4, interval=2, sink=1, window=1)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def rollout(model):
    """Three responses to each of three prompts, of different lengths."""
    return generate(
        model,
        PROMPTS,
        IS_PROMPT,
        cache=SPEC,
        max_new_tokens=9,
        eos_token_id=list(range(10, 16)),
        pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
        num_return_sequences=3,
    )


def plain(model, rollout, record):
    return hidden_states(model, rollout.input_ids, token_positions(rollout.attention_mask), record=record)


def flat(model, rollout, record):
    mask = rollout.attention_mask
    return learner_states(model, rollout.input_ids, mask, prompt_columns(rollout), record)


def tokens_of(rollout, record):
    return flat_tokens(rollout.input_ids, rollout.attention_mask, prompt_columns(rollout), record)


def states_and_gradients(forward, model, rollout, record):
    """Return the states of tokens, and the gradients of a loss that weighs each of them differently."""
    model.zero_grad()
    hidden = forward(model, rollout, record)[rollout.attention_mask]
    # Rows of one prompt must not weigh alike, or a gradient from one of them alone would pass.
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return hidden.detach(), gradients


def error(actual, expected):
    return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("view", ["shadow", "dense"])
@pytest.mark.parametrize("form", ["as sampled", "packed", "shuffled"])
def test_states_and_gradients_are_those_of_the_whole_batch(model, rollout, view, form):
    if form != "as sampled":
        rows = torch.arange(9) if form == "packed" else torch.tensor([8, 0, 4, 1, 7, 2, 3])
        rollout = packed(rollout, rollout.attention_mask, rows)
    record = replayed(rollout, shadow=view == "shadow")
    expected = states_and_gradients(plain, model, rollout, record)
    assert error(states_and_gradients(flat, model, rollout, record), expected) < 1e-5


def test_in_float64_they_agree_to_its_rounding(rollout):
    """On a GPT-2, whose norms are in the precision of its weights."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = prepare_backbone(GPT2LMHeadModel(config).double())
    record = Record(replayed(rollout).evicted_at[:, :, :1])
    expected = states_and_gradients(plain, model, rollout, record)
    assert error(states_and_gradients(flat, model, rollout, record), expected) < 1e-12


def test_a_gradient_that_reaches_a_prompt_from_its_first_row_alone_is_found(model, rollout, monkeypatch):
    import lit_rlkv.models.learner as module

    def without_sums(*args):
        tokens = flat_tokens(*args)
        return replace(tokens, shared=tokens.shared[:0], shared_cells=tokens.shared_cells[:0])

    record = replayed(rollout)
    expected = states_and_gradients(plain, model, rollout, record)
    monkeypatch.setattr(module, "flat_tokens", without_sums)
    states, gradients = states_and_gradients(flat, model, rollout, record)
    assert error([states], expected[:1]) < 1e-5
    assert error([gradients], expected[1:]) > 1e-2


def test_each_token_is_computed_once(model, rollout):
    tokens = tokens_of(rollout, replayed(rollout))
    n_responses = int(rollout.response_mask.sum())
    assert len(tokens.cells) == IS_PROMPT.sum() + n_responses < rollout.attention_mask.sum()
    assert tokens.members.sum(dim=1).tolist() == [3, 3, 3]
    assert torch.equal(tokens.flatten(rollout.input_ids)[tokens.place][rollout.attention_mask],
                       rollout.input_ids[rollout.attention_mask])  # fmt: skip
    widths = []
    handle = model.base_model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: widths.append(tuple(args[0].shape[:2]))
    )
    flat(model, rollout, replayed(rollout))
    handle.remove()
    assert widths == [(1, len(tokens.cells))]


def test_rows_share_a_prompt_only_if_its_own_queries_see_the_same(model, rollout):
    record = Record(replayed(rollout).evicted_at.clone())
    record.evicted_at[1, 0, 0, 2] = 3  # for its query in column 3, row 1 has lost the prompt's first key
    members = tokens_of(rollout, record).members
    assert [row.nonzero().flatten().tolist() for row in members] == [[0, 2], [3, 4, 5], [6, 7, 8]]
    expected = states_and_gradients(plain, model, rollout, record)
    assert error(states_and_gradients(flat, model, rollout, record), expected) < 1e-5


def test_other_tokens_or_other_columns_are_another_prompt(rollout):
    ids, never = rollout.input_ids.clone(), Record(torch.full((9, 1, 1, rollout.input_ids.shape[1]), NEVER))
    ids[2, 3] += 1
    mask, n_prompt = rollout.attention_mask.clone(), prompt_columns(rollout)
    mask[3, 1] = False  # one token less
    members = flat_tokens(ids, mask, n_prompt, never).members
    assert [row.nonzero().flatten().tolist() for row in members] == [[0, 1], [4, 5], [6, 7, 8]]


def test_a_batch_without_padding_and_equal_prompts_stays_as_it_is():
    ids = torch.arange(12).view(2, 6)
    mask = torch.ones_like(ids, dtype=torch.bool)
    never = Record(torch.full((2, 1, 1, 6), NEVER))
    assert flat_tokens(ids, mask, torch.tensor([3, 3]), never) is None
    assert flat_tokens(ids[:1].expand(2, -1), mask, torch.tensor([3, 3]), never) is not None


def test_a_batch_of_which_no_token_is_read_has_no_flat_sequence():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    record = Record(torch.zeros(2, 1, 1, 3, dtype=torch.int32))
    assert flat_tokens(torch.ones(2, 3, dtype=torch.long), nothing, torch.tensor([1, 1]), record) is None
