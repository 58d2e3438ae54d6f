"""Worked solutions and preference pairs as batches of tokens."""

import random

import pytest
import torch

from lit_rlkv.data.pairs import encode_demonstrations, encode_pairs, preference_pair
from lit_rlkv.data.tasks import ChainSum
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions
from lit_rlkv.types import PreferencePair, Problem

TOKENIZER = build_task_tokenizer()
PAIRS = [PreferencePair("1+2=", "3", "14"), PreferencePair("9=", "9", "")]
T, F = True, False


class Forgiving(ChainSum):
    """A task whose verifier is broken: everything is right."""

    def score(self, problem, completion):
        return 1.0


def test_a_pair_sets_the_solution_against_a_corruption():
    problem = Problem("7+3=", "7,10", "10")
    pair = preference_pair(ChainSum(), problem, random.Random(0))
    assert (pair.prompt, pair.chosen) == ("7+3=", "7,10")
    assert ChainSum().score(problem, pair.rejected) == 0.0
    assert preference_pair(ChainSum(), problem, random.Random(0)) == pair


def test_a_pair_that_the_verifier_cannot_tell_apart_is_refused():
    with pytest.raises(ValueError, match="Forgiving scores the two sides"):
        preference_pair(Forgiving(), Problem("7+3=", "7,10", "10"), random.Random(0))


def test_pairs_share_the_column_where_completions_start():
    batch = encode_pairs(TOKENIZER, PAIRS)
    # Ids: digit d is d + 2, pad 0, eos 1. Completions start at column 4, the longest is "14<eos>".
    plus, equals = TOKENIZER.convert_tokens_to_ids(["+", "="])
    assert batch.chosen_ids.tolist() == [[3, plus, 4, equals, 5, 1, 0], [0, 0, 11, equals, 11, 1, 0]]
    assert batch.rejected_ids.tolist() == [[3, plus, 4, equals, 3, 6, 1], [0, 0, 11, equals, 1, 0, 0]]
    assert batch.chosen_is_token.tolist() == [[T, T, T, T, T, T, F], [F, F, T, T, T, T, F]]
    assert batch.rejected_is_token.tolist() == [[T, T, T, T, T, T, T], [F, F, T, T, T, F, F]]
    assert batch.chosen_is_target.tolist() == [[F, F, F, F, T, T, F], [F, F, F, F, T, T, F]]
    assert batch.rejected_is_target.tolist() == [[F, F, F, F, T, T, T], [F, F, F, F, T, F, F]]


def test_targets_decode_to_the_completions():
    batch = encode_pairs(TOKENIZER, PAIRS)
    assert decode_completions(TOKENIZER, batch.chosen_ids, batch.chosen_is_target) == ["3", "9"]
    assert decode_completions(TOKENIZER, batch.rejected_ids, batch.rejected_is_target) == ["14", ""]


def test_demonstrations_are_the_worked_solutions_alone():
    batch = encode_demonstrations(TOKENIZER, [Problem("1+2=", "3", "3"), Problem("9=", "9,9", "9")])
    assert batch.token_ids.shape == (2, 4 + 4)
    assert decode_completions(TOKENIZER, batch.token_ids, batch.is_target) == ["3", "9,9"]
    assert batch.is_target.sum(dim=1).tolist() == [2, 4]
    assert (batch.is_token & ~batch.is_target).sum(dim=1).tolist() == [4, 2]


def test_the_end_of_sequence_is_a_target_even_where_it_is_also_the_padding():
    tokenizer = build_task_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = encode_demonstrations(tokenizer, [Problem("1=", "1", "1"), Problem("12=", "1,2", "2")])
    assert batch.token_ids[0].tolist() == [1, 3, TOKENIZER.convert_tokens_to_ids("="), 3, 1, 1, 1]
    assert batch.is_token[0].tolist() == [F, T, T, T, T, F, F]
    assert batch.is_target[0].tolist() == [F, F, F, T, T, F, F]


def test_a_batch_has_rows_like_every_other_batch():
    batch = encode_pairs(TOKENIZER, PAIRS).rows(slice(1, 2))
    assert batch.chosen_ids.shape == batch.rejected_is_target.shape == (1, 7)
    assert torch.equal(batch.chosen_ids, encode_pairs(TOKENIZER, PAIRS).chosen_ids[1:])
