"""Demonstrations and preference pairs as batches."""

import random
from dataclasses import replace

import pytest
import torch

from lit_rlkv.data.demonstrations import (
    PreferenceDataModule,
    dense_hidden,
    encode_completions,
    preference_pair,
)
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.tasks import ChainSum
from lit_rlkv.types import Message, Problem

TOKENIZER = build_task_tokenizer()
PROMPTS = ["1+2=", "9="]
T, F = True, False


class Forgiving(ChainSum):
    """A task whose verifier is broken: everything is right."""

    def score(self, problem, completion):
        return 1.0


class Taste:
    """A task without a verifier: the last letter of the alphabet was preferred to what `worse` says."""

    is_verifiable = False

    def __init__(self, worse):
        self.worse = worse

    def sample(self, rng):
        return Problem((Message("user", "a or z?"),), "z", "z")

    def score(self, problem, completion):
        return 0.5

    def corrupt(self, problem, rng):
        return self.worse


def test_a_pair_is_the_solution_and_a_corruption():
    problem = Problem("7+3=", "7,10", "10")
    pair = preference_pair(ChainSum(), problem, random.Random(0))
    assert (pair.prompt, pair.chosen) == ("7+3=", "7,10")
    assert ChainSum().score(problem, pair.rejected) == 0.0
    assert preference_pair(ChainSum(), problem, random.Random(0)) == pair


def test_a_pair_that_the_verifier_cannot_tell_apart_is_refused():
    with pytest.raises(ValueError, match="Forgiving must score the two sides"):
        preference_pair(Forgiving(), Problem("7+3=", "7,10", "10"), random.Random(0))


def test_without_a_verifier_the_sides_of_a_pair_need_only_differ():
    rng = random.Random(0)
    pair = preference_pair(Taste("a"), Taste("a").sample(rng), rng)
    assert (pair.chosen, pair.rejected) == ("z", "a")
    assert pair.prompt == (Message("user", "a or z?"),)
    with pytest.raises(ValueError, match=r"the sides of .* must differ; fix corrupt of Taste"):
        preference_pair(Taste("z"), Taste("z").sample(rng), rng)


def test_completions_start_in_one_column():
    batch = encode_completions(TOKENIZER, PROMPTS, ["14", ""])
    # Ids: digit d is d + 2, pad 0, eos 1. Completions start at column 4, the longest is "14<eos>".
    plus, equals = TOKENIZER.convert_tokens_to_ids(["+", "="])
    assert batch.input_ids.tolist() == [[3, plus, 4, equals, 3, 6, 1], [0, 0, 11, equals, 1, 0, 0]]
    assert batch.attention_mask.tolist() == [[T, T, T, T, T, T, T], [F, F, T, T, T, F, F]]
    assert batch.is_target.tolist() == [[F, F, F, F, T, T, T], [F, F, F, F, T, F, F]]


def test_targets_decode_to_the_completions():
    batch = encode_completions(TOKENIZER, PROMPTS, ["14", ""])
    assert decode_completions(TOKENIZER, batch.input_ids, batch.is_target) == ["14", ""]


def test_only_completion_tokens_are_targets():
    batch = encode_completions(TOKENIZER, PROMPTS, ["3", "9,9"])
    assert batch.input_ids.shape == (2, 4 + 4)
    assert decode_completions(TOKENIZER, batch.input_ids, batch.is_target) == ["3", "9,9"]
    assert batch.is_target.sum(dim=1).tolist() == [2, 4]
    assert (batch.attention_mask & ~batch.is_target).sum(dim=1).tolist() == [4, 2]


def test_the_end_of_sequence_is_a_target_even_if_it_is_the_padding():
    tokenizer = build_task_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = encode_completions(tokenizer, ["1=", "12="], ["1", "1,2"])
    assert batch.input_ids[0].tolist() == [1, 3, TOKENIZER.convert_tokens_to_ids("="), 3, 1, 1, 1]
    assert batch.attention_mask[0].tolist() == [F, T, T, T, T, F, F]
    assert batch.is_target[0].tolist() == [F, F, F, T, T, F, F]


def test_a_batch_has_rows_like_every_other_batch():
    whole = encode_completions(TOKENIZER, PROMPTS, ["14", ""])
    batch = whole.rows(slice(1, 2))
    assert batch.input_ids.shape == batch.is_target.shape == (1, 7)
    assert torch.equal(batch.input_ids, whole.input_ids[1:])


def test_hidden_states_do_not_depend_on_the_padding():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))
    with torch.no_grad():
        batch = encode_completions(TOKENIZER, PROMPTS, ["14", ""])
        padded = dense_hidden(backbone, batch)[1, 2:5]
        alone = dense_hidden(backbone, encode_completions(TOKENIZER, PROMPTS[1:], [""]))[0]
        seen = replace(batch, attention_mask=torch.ones_like(batch.attention_mask))
        assert torch.allclose(padded, alone, atol=1e-5)
        assert not torch.allclose(dense_hidden(backbone, seen)[1, 2:5], alone, atol=1e-2)


def test_the_length_of_a_batch_excludes_padding():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))
    backbone.config.max_position_embeddings = 8
    prompts, completions = ["1+2=", "9="], ["14", "1234"]  # 7 tokens in each row, in 9 columns
    batch = encode_completions(TOKENIZER, prompts, completions)
    with torch.no_grad():
        hidden = dense_hidden(backbone, batch)
        alone = [
            dense_hidden(backbone, encode_completions(TOKENIZER, prompts[n : n + 1], completions[n : n + 1]))[
                0
            ]
            for n in range(2)
        ]
    assert batch.input_ids.shape == (2, 9)
    assert torch.allclose(hidden[batch.attention_mask], torch.cat(alone), atol=1e-5)
    with pytest.raises(ValueError, match=r"may reach 9 tokens, but .* has positions for 8"):
        dense_hidden(backbone, encode_completions(TOKENIZER, ["1+2=", "9="], ["1234", "1"]))


TASK = ChainSum(n_terms=2, max_operand=3)


def make_data(**options):
    options = {"batch_size": 16, "n_pairs": 8, "steps_per_loader": 10, "seed": 0} | options
    return PreferenceDataModule(TASK, PromptSource(TASK, split="train", seed=0), TOKENIZER, **options)


def texts(side):
    return decode_completions(TOKENIZER, side.input_ids, side.is_target)


def test_pairs_share_their_prompt_and_batches_differ():
    datamodule = make_data()
    first, second = datamodule.next_batch(), datamodule.next_batch()
    assert not torch.equal(first.chosen.input_ids, second.chosen.input_ids)
    n_prompt = int((~first.chosen.is_target[0] & first.chosen.attention_mask[0]).sum())
    assert torch.equal(first.chosen.input_ids[:8, :n_prompt], first.rejected.input_ids[:, :n_prompt])


def test_the_chosen_side_is_right_and_the_rejected_side_wrong():
    problems = PromptSource(TASK, split="train", seed=0).take(16)
    batch = make_data().next_batch()
    assert [TASK.score(*pair) for pair in zip(problems, texts(batch.chosen), strict=True)] == [1.0] * 16
    assert [TASK.score(*pair) for pair in zip(problems[:8], texts(batch.rejected), strict=True)] == [0.0] * 8


def test_a_restored_module_continues_its_batches():
    datamodule = make_data()
    datamodule.next_batch()
    state = datamodule.state_dict()
    second, again = datamodule.next_batch(), make_data()
    again.load_state_dict(state)
    assert torch.equal(again.next_batch().rejected.input_ids, second.rejected.input_ids)
    assert not torch.equal(make_data().next_batch().chosen.input_ids, second.chosen.input_ids)


def test_each_loader_continues_after_the_last():
    whole = [batch.chosen.input_ids for batch in make_data(steps_per_loader=4).train_dataloader()]
    datamodule = make_data(steps_per_loader=2)
    parts = [batch.chosen.input_ids for _ in range(2) for batch in datamodule.train_dataloader()]
    assert len(parts) == 4
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_demonstrations_are_the_same_with_and_without_pairs():
    plain, paired = make_data(n_pairs=0), make_data()
    for _ in range(2):
        without, with_pairs = plain.next_batch(), paired.next_batch()
        assert without.rejected is None
        assert torch.equal(without.chosen.input_ids, with_pairs.chosen.input_ids)
        assert without.to("cpu").rejected is None
