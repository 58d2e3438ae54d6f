"""Perplexity of texts: transformers' loss with all keys, replayed log-probs under a cache, refusals."""

import json
import math
from dataclasses import replace

import pytest
import torch

from lit_rlkv import CacheSpec, generate
from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.evaluation.perplexity import check_texts_fit, read_texts, summed_nll
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import replay_logps
from tests.evaluation.test_evaluator import SPARSE, make_evaluator
from tests.models_zoo import tiny_model

LENGTHS = [12, 23, 2, 17, 9]


def texts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 16, (n,), generator=generator).tolist() for n in LENGTHS]


def perplexity(cache, **options):
    return make_evaluator(texts=texts(), **options)._perplexity(cache)


@torch.no_grad()
def test_with_all_keys_it_is_the_exponential_of_transformers_loss_over_all_tokens():
    evaluator = make_evaluator(texts=texts())
    total = 0.0
    with acting_as(evaluator.roles, "policy") as model:
        for text in texts():
            ids = torch.tensor([text])
            total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * (len(text) - 1)
    expected = math.exp(total / (sum(LENGTHS) - len(LENGTHS)))
    assert evaluator.score_cache(CacheSpec.dense()).row.perplexity == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_under_a_cache_it_is_that_of_replayed_log_probs(dtype):
    cache = CacheSpec(policy="h2o", budget=7, interval=2, sink=1, window=2, dtype=dtype)
    model, begin = tiny_model(), torch.tensor([[3], [5]])
    rollout = generate(
        model, begin, torch.ones_like(begin), cache=cache, max_new_tokens=20, eos_token_id=0, pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    given = [ids[mask].tolist() for ids, mask in zip(rollout.input_ids, rollout.attention_mask, strict=True)]
    found = summed_nll(model, given, cache, torch.Generator())
    with torch.no_grad():
        replayed, dense = (
            -float(replay_logps(model, rollout, shadow=shadow).sum()) for shadow in (True, False)
        )
    assert found == pytest.approx(replayed, abs=1e-3)
    assert abs(found - dense) > 1e-1


def test_a_smaller_budget_changes_it_and_none_is_measured_without_texts():
    found = [perplexity(replace(SPARSE, budget=n)) for n in (4, 7)]
    assert len({*found, perplexity(CacheSpec.dense())}) == 3
    assert make_evaluator()._perplexity(SPARSE) is None


def test_it_depends_on_neither_passes_nor_ranks():
    whole = perplexity(SPARSE)
    assert perplexity(SPARSE, batch_size=1) == pytest.approx(whole, rel=1e-5)
    assert perplexity(SPARSE, tokens_per_pass=24) == pytest.approx(whole, rel=1e-5)


class OfTwo(Ranks):
    """One of two ranks, which waits for no other."""

    size = 2

    def __init__(self, rank):
        self.rank = rank

    def all_gather_object(self, own):
        self.own = own
        return own


def test_ranks_share_the_passes():
    found = []
    for rank in (0, 1):
        evaluator = make_evaluator(texts=texts(), batch_size=2)
        evaluator.ranks = OfTwo(rank)
        evaluator._perplexity(SPARSE)
        found += evaluator.ranks.own
    assert sorted(number for number, _ in found) == [0, 1, 2]
    mean = sum(nll for _, nll in found) / (sum(LENGTHS) - len(LENGTHS))
    assert math.exp(mean) == pytest.approx(perplexity(SPARSE, batch_size=2))


def written(folder, *rows):
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_texts_are_read_as_their_tokens(tmp_path):
    tokenizer = build_task_tokenizer()
    table = read_texts(written(tmp_path, {"text": "12+3=15"}, {"text": "7=", "more": 1}), tokenizer)
    expected = encode_prompts(tokenizer, ["12+3=15", "7="])
    assert table.rows == [
        ids[mask].tolist() for ids, mask in zip(expected.input_ids, expected.attention_mask, strict=True)
    ]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], r"texts\.jsonl"),
        (
            [{"text": "12"}, {"text": ""}],
            "texts.jsonl:2: the text '' has 0 tokens, and the first is not scored",
        ),
        ([{"text": "1"}], "has 1 tokens"),
        ([{"prompt": "12"}], "no column 'text', it has prompt; evaluation.perplexity reads"),
        ([{"text": 12}], "text must be a text, got 12"),
        ([{"text": "1%"}], "no token for '%'"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(tmp_path, rows, reason):
    with pytest.raises(ValueError, match=reason):
        read_texts(written(tmp_path, *rows), build_task_tokenizer())


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_texts(str(tmp_path / "none.jsonl"), build_task_tokenizer())


def test_a_text_longer_than_the_positions_of_the_model_is_named(tmp_path):
    model = tiny_model()
    most = model.config.max_position_embeddings
    rows = [{"text": "1" * n} for n in (2, most + 1, 5)]
    tokenizer = build_task_tokenizer()
    with pytest.raises(
        ValueError,
        match=rf"positions for {most}; shorten the texts; the longest text is .*:2 \({most + 1} tok",
    ):
        check_texts_fit(model, read_texts(written(tmp_path, *rows), tokenizer))
    check_texts_fit(model, read_texts(written(tmp_path, rows[0], {"text": "1" * most}), tokenizer))
