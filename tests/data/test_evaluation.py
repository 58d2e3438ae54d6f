import pytest
import torch

from lit_rlkv.data.evaluation import EvalConfig, Evaluator
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tasks import ChainSum
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions, encode_prompts
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.replay import replay_logps
from lit_rlkv.rollout import generate
from tests.training import make_roles

SPARSE = CacheSpec(policy="snapkv", budget=7, interval=2, sink=1, window=2)


class Parity(ChainSum):
    """A task of which even an untrained model gets about half right."""

    def score(self, problem, completion):
        return float(sum(map(ord, problem.prompt + completion)) % 2)


def make_evaluator(**options):
    roles, tokenizer, task = make_roles(), build_task_tokenizer(), Parity(n_terms=3)
    problems = PromptSource(task, split="eval", seed=0).take(24)
    config = {
        "max_new_tokens": 10,
        "temperature": 0.0,
        "sampling_temperature": 1.0,
        "n_mismatch": 16,
        "batch_size": 10,
        "seed": 0,
    }
    return Evaluator(roles, tokenizer, task, problems, EvalConfig(**config | options))


def test_accuracy_is_that_of_greedy_responses_scored_one_by_one():
    evaluator = make_evaluator()
    row, _ = evaluator.score_cache(SPARSE)
    n_right = n_tokens = 0
    for problem in evaluator.problems:
        prompt = encode_prompts(evaluator.tokenizer, [problem.prompt])
        rollout = generate(
            evaluator.roles.backbone("policy"),
            prompt.token_ids,
            prompt.attention_mask,
            cache=SPARSE,
            max_new_tokens=10,
            eos_token_id=1,
            pad_token_id=0,
            temperature=0.0,
        )
        (text,) = decode_completions(evaluator.tokenizer, rollout.token_ids, rollout.is_action)
        n_right += evaluator.task.score(problem, text)
        n_tokens += int(rollout.is_action.sum())
    assert 0 < n_right < 24
    assert (row.accuracy, row.n_problems, row.mean_length) == (n_right / 24, 24, n_tokens / 24)


def test_mismatch_is_the_mean_log_ratio_of_sampler_and_dense_learner():
    evaluator = make_evaluator(sampling_temperature=0.7)
    row, sampled = evaluator.score_cache(SPARSE)
    dense = replay_logps(evaluator.roles.backbone("policy"), sampled, shadow=False, temperature=0.7)
    terms = [
        (sampled.sampler_logps[r, c] - dense[r, c]).item() for r, c in sampled.is_action.nonzero().tolist()
    ]
    assert len(sampled.token_ids) == 16
    assert row.kl == pytest.approx(sum(terms) / len(terms), abs=1e-6)
    assert abs(row.kl) > 1e-3
    assert row.replay_gap < 1e-4


def test_a_dense_cache_has_no_mismatch_and_costs_more_bytes():
    evaluator = make_evaluator()
    dense, _ = evaluator.score_cache(CacheSpec.dense())
    sparse, _ = evaluator.score_cache(SPARSE)
    assert dense.kl == pytest.approx(0.0, abs=1e-5)
    assert (dense.cache, dense.budget) == ("dense", None)
    assert (sparse.cache, sparse.budget) == ("snapkv 7+2", 7)
    # 6 prompt tokens and 10 new ones against 9 slots
    assert sparse.kv_bytes / dense.kv_bytes == pytest.approx(9 / 16)


def test_the_same_seed_gives_the_same_row():
    first, second = (make_evaluator(temperature=1.0).score_cache(SPARSE)[0] for _ in range(2))
    assert first == second
    assert make_evaluator(temperature=1.0, seed=1).score_cache(SPARSE)[0] != first


def test_gradients_are_not_kept():
    evaluator = make_evaluator()
    _, sampled = evaluator.score_cache(SPARSE)
    assert not sampled.sampler_logps.requires_grad
    assert torch.is_grad_enabled()
