import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from lit_rlkv.config.schema import EvaluationConfig, RewardConfig, RolloutConfig
from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.evaluation.evaluator import Evaluator, caches_to_evaluate
from lit_rlkv.experience.reward import RewardRule, RewardsFailedError
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.replay import replay_logps
from lit_rlkv.non_finite import NonFiniteError
from lit_rlkv.rewards import RewardManager
from lit_rlkv.rollout import generate
from lit_rlkv.tasks import ChainSum
from tests.environments.talkers import Counter, Crashing, quick_tokenizer
from tests.hand_built import LORA, make_roles, make_run
from tests.models_zoo import build, tiny_config
from tests.rewards.helpers import InThreads

SPARSE = CacheSpec(policy="snapkv", budget=7, interval=2, sink=1, window=2)


class Parity(ChainSum):
    """A task of which even an untrained model gets about half right."""

    def score(self, problem, completion):
        return float(sum(map(ord, problem.prompt + completion)) % 2)


TASK = Parity(n_terms=3)
TASK_PROBLEMS = PromptSource(TASK, split="eval", seed=0).take(24)


def make_evaluator(seed=0, **options):
    roles, tokenizer, task = make_roles(), build_task_tokenizer(), TASK
    problems = PromptSource(task, split="eval", seed=0).take(24)
    settings = {"temperature": 0.0, "n_mismatch": 16, "top_k": None, "top_p": 1.0, "min_p": None}
    settings |= {name: options.pop(name) for name in [*options] if name in settings}
    rollout = RolloutConfig(**{"max_new_tokens": 10} | options.pop("rollout", {}))
    scoring = {name: options.pop(name) for name in ("accuracy", "rule", "rewards") if name in options}
    run = make_run(task, tokenizer, rollout, seed=seed, evaluation=EvaluationConfig(**settings))
    evaluator = Evaluator(run, roles, problems, **{"batch_size": 10} | options)
    vars(evaluator).update(scoring)
    return evaluator


def test_accuracy_is_that_of_greedy_responses_scored_one_by_one():
    evaluator = make_evaluator()
    row = evaluator.score_cache(SPARSE).row
    n_right = n_tokens = 0
    for problem in evaluator.problems:
        prompt = encode_prompts(evaluator.tokenizer, [problem.prompt])
        rollout = generate(
            evaluator.roles.backbone("policy"),
            prompt.input_ids,
            prompt.attention_mask,
            cache=SPARSE,
            max_new_tokens=10,
            eos_token_id=1,
            pad_token_id=0,
            temperature=0.0,
        )
        (text,) = decode_completions(evaluator.tokenizer, rollout.input_ids, rollout.response_mask)
        n_right += TASK.score(problem, text)
        n_tokens += int(rollout.response_mask.sum())
    assert 0 < n_right < 24
    assert (row.accuracy, row.n_problems, row.mean_length) == (n_right / 24, 24, n_tokens / 24)


@pytest.mark.parametrize(
    "rollout", [{"temperature": 0.7}, {"top_k": 12, "top_p": 0.8}, {"replay_routing": True}], ids=str
)
def test_the_mismatch_is_the_mean_log_ratio_of_sampler_and_dense_learner(rollout):
    evaluator = make_evaluator(rollout=rollout)
    if "replay_routing" in rollout:
        experts = prepare_backbone(build(tiny_config("mixtral")))
        evaluator.roles = Roles("ppo", lambda role: experts, lora=LORA, needed=())
    found = evaluator.score_cache(SPARSE)
    row, sampled, temperature = found.row, found.rollout, rollout.get("temperature", 1.0)

    def kl(read, temperature):
        with torch.no_grad():
            backbone = evaluator.roles.backbone("policy")
            dense = replay_logps(backbone, read, shadow=False, temperature=temperature)
        return float((read.rollout_logps - dense)[read.response_mask].mean())

    assert len(sampled.input_ids) == 16
    assert row.kl == pytest.approx(kl(sampled, temperature), abs=1e-5)
    assert row.replay_gap < 1e-4
    # the control: a learner at another temperature, over all tokens, with experts of its own
    without = sampled.with_record(sampling_masks=None, expert_ids=None)
    assert row.kl != pytest.approx(kl(without, 1.0), abs=1e-4)


def test_scored_responses_have_a_truncation_of_their_own():
    greedy = make_evaluator().score_cache(SPARSE)
    nearly = make_evaluator(temperature=1.0, top_k=1, rollout={"top_p": 0.5}).score_cache(SPARSE)
    assert [s.completion for s in nearly.samples] == [s.completion for s in greedy.samples]
    assert int(nearly.rollout.record.sampling_masks.counts.max()) > 1
    free = make_evaluator(temperature=1.0).score_cache(SPARSE)
    assert [s.completion for s in free.samples] != [s.completion for s in greedy.samples]


def test_a_policy_that_has_diverged_has_no_score():
    evaluator = make_evaluator()
    head = evaluator.roles.backbone("policy").get_output_embeddings()
    head.weight.data[20, 0] = torch.nan  # of a token that greedy decoding may never look at
    with pytest.raises(NonFiniteError, match=r"log-probs are not finite with cache snapkv 7\+2"):
        evaluator.score_cache(SPARSE)


def test_a_dense_cache_has_no_mismatch_and_costs_more_bytes():
    evaluator = make_evaluator()
    dense, sparse = (evaluator.score_cache(cache).row for cache in (CacheSpec.dense(), SPARSE))
    assert dense.kl == pytest.approx(0.0, abs=1e-5)
    assert (dense.cache, dense.budget) == ("dense", None)
    assert (sparse.cache, sparse.budget) == ("snapkv 7+2", 7)
    # 6 prompt tokens and 10 new ones against 9 slots
    assert sparse.kv_bytes / dense.kv_bytes == pytest.approx(9 / 16)


def test_the_same_seed_gives_the_same_row():
    first, second = (make_evaluator(temperature=1.0).score_cache(SPARSE).row for _ in range(2))
    assert first == second
    assert make_evaluator(temperature=1.0, seed=1).score_cache(SPARSE).row != first


class Together(Ranks):
    """Ranks that are threads."""

    def __init__(self, rank, brought):
        self.rank, self.size = rank, len(brought)
        self.brought = brought

    def all_gather_object(self, values):
        self.brought[self.rank] = list(values)
        MET.wait()
        everything = [value for of_rank in self.brought for value in of_rank]
        MET.wait()
        return everything


MET = Barrier(2, timeout=60)  # seconds: where one fails, the other is not to wait for ever


def test_ranks_share_the_batches_and_the_mismatch_and_find_what_one_finds():
    options = {"temperature": 1.0, "batch_size": 8}
    alone = make_evaluator(**options).score_cache(SPARSE)
    brought = [[], []]
    evaluators = [make_evaluator(**options) for _ in brought]
    for rank, evaluator in enumerate(evaluators):
        evaluator.ranks = Together(rank, brought)
    # Of three batches and the mismatch each has two.
    assert [[number for number, _ in one._own_batches()] for one in evaluators] == [[1], [0, 2]]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda evaluator: evaluator.score_cache(SPARSE), evaluators)
    assert first.row == second.row == alone.row
    assert first.samples == second.samples == alone.samples
    assert torch.equal(first.rollout.input_ids, alone.rollout.input_ids)
    assert second.rollout is None


def test_gradients_are_not_kept():
    evaluator = make_evaluator()
    assert not evaluator.score_cache(SPARSE).rollout.rollout_logps.requires_grad
    assert torch.is_grad_enabled()


def test_every_sample_of_every_problem_is_kept_with_its_score():
    evaluator = make_evaluator(temperature=1.0, n_samples=3)
    found = evaluator.score_cache(SPARSE)
    assert [(s.problem, s.sample) for s in found.samples] == [(i, j) for i in range(24) for j in range(3)]
    for sample in found.samples:
        problem = evaluator.problems[sample.problem]
        assert (sample.prompt, sample.answer, sample.cache) == (problem.prompt, problem.answer, "snapkv 7+2")
        assert sample.score == TASK.score(problem, sample.completion)
    assert found.row.accuracy == pytest.approx(sum(s.score for s in found.samples) / 72)
    assert found.row.mean_length == pytest.approx(sum(s.n_tokens for s in found.samples) / 72)
    of_first = {s.completion for s in found.samples if s.problem == 0}
    assert len(of_first) == 3  # drawn anew each


@pytest.mark.parametrize(
    ("n_samples", "batch_size", "batches"),
    [
        (1, 10, [(0, 10, 0, 1), (10, 20, 0, 1), (20, 24, 0, 1)]),
        (4, 50, [(0, 12, 0, 4), (12, 24, 0, 4)]),
        (5, 3, [(i, i + 1, *part) for i in range(24) for part in ((0, 3), (3, 5))]),
    ],
)
def test_no_batch_exceeds_the_batch_size(n_samples, batch_size, batches):
    evaluator = make_evaluator(n_samples=n_samples, batch_size=batch_size)
    assert list(evaluator._batches()) == batches
    assert all((stop - start) * (last - first) <= batch_size for start, stop, first, last in batches)


def test_samples_that_are_drawn_in_rounds_differ():
    evaluator = make_evaluator(temperature=1.0, n_samples=4, batch_size=2)
    texts = [s.completion for s in evaluator.score_cache(SPARSE).samples]
    assert [texts[i : i + 2] for i in range(0, len(texts), 4)] != [
        texts[i + 2 : i + 4] for i in range(0, len(texts), 4)
    ]
    assert len({*texts[:4]}) == 4


def test_a_score_that_failed_is_not_right_and_too_many_of_all_end_the_evaluation():
    evaluator = make_evaluator(batch_size=1)
    n = len(evaluator.problems)
    evaluator.task = FailingOn({0})
    found = evaluator.score_cache(CacheSpec.dense())
    assert found.row.accuracy == pytest.approx((n - 1) / n)
    assert found.samples[0].score == 0.0
    evaluator.task = FailingOn(set(range(n // 2 + 1)))
    with pytest.raises(RewardsFailedError, match=f"{n // 2 + 1} of {n} completions have no score"):
        evaluator.score_cache(CacheSpec.dense())


class FailingOn(ChainSum):
    """All right, but without a score at some places in the order of asking."""

    def __init__(self, places=()):
        super().__init__(n_terms=3)
        self.places, self.asked = places, itertools.count()

    def score(self, problem, completion):
        return math.nan if next(self.asked) in self.places else 1.0


def failing_up_to(max_failed):
    return RewardRule(RewardConfig(verifier=1.0, max_failed=max_failed))


def by_length(question):
    return {0: 1.0, 1: 0.5}.get(sum(map(ord, question["completion"])) % 3, 0.0)


@pytest.mark.parametrize("accuracy", ["exact_match", "graded", None])
def test_full_score_is_correct_and_the_mean_reward_has_all_weights(accuracy):
    functions = {"graded": InThreads(ask=by_length, weight=2.0)}
    rule = RewardRule(RewardConfig(verifier=0.25, max_failed=0.0), functions)
    with RewardManager(functions) as rewards:
        found = make_evaluator(accuracy=accuracy, rule=rule, rewards=rewards).score_cache(SPARSE)
    own = [TASK.score(problem, s.completion) for problem, s in zip(TASK_PROBLEMS, found.samples, strict=True)]
    graded = [by_length({"completion": s.completion}) for s in found.samples]
    assert {0.0, 0.5, 1.0} == {*graded}
    weighted = [0.25 * a + 2.0 * b for a, b in zip(own, graded, strict=True)]
    assert [s.reward for s in found.samples] == pytest.approx(weighted)
    assert found.row.reward == pytest.approx(sum(weighted) / 24)
    share = {"exact_match": own.count(1.0) / 24, "graded": graded.count(1.0) / 24, None: None}[accuracy]
    assert found.row.accuracy == share
    assert ({s.score for s in found.samples} == {None}) is (accuracy is None)


def test_rewards_that_fail_leave_an_accuracy_by_the_task(caplog):
    functions = {"judge": InThreads(ask=lambda question: 1 / 0)}
    rule = RewardRule(RewardConfig(max_failed=0.0), functions)
    with RewardManager(functions) as rewards:
        row = make_evaluator(rule=rule, rewards=rewards).score_cache(SPARSE).row
        assert (row.accuracy, row.reward) == (make_evaluator().score_cache(SPARSE).row.accuracy, None)
        assert "reward.functions.judge failed: division by zero" in caplog.text
        with pytest.raises(RewardsFailedError, match="24 of 24 completions have no score"):
            make_evaluator(accuracy=None, rule=rule, rewards=rewards).score_cache(SPARSE)


def test_the_share_of_responses_that_lost_keys_is_counted():
    small, wide = (
        make_evaluator().score_cache(replace(SPARSE, budget=n)).row.affected for n in (SPARSE.budget, 40)
    )
    assert 0 < small <= 1
    assert wide == make_evaluator().score_cache(CacheSpec.dense()).row.affected == 0


@pytest.mark.parametrize("n_samples", [1, 12])
def test_progress_counts_the_tokens_of_all_batches_and_of_the_mismatch(n_samples):
    evaluator, reports = make_evaluator(n_samples=n_samples, temperature=1.0), []
    evaluator.score_cache(SPARSE, reports.append)
    assert sum(reports) == evaluator.n_tokens == (24 * n_samples + 16) * 10
    assert len(reports) > 3 * 9  # batches of 10 responses, reported step by step


def talking(environment, **options):
    """Return an evaluator of responses with several turns."""
    evaluator, tokenizer = make_evaluator(**options), quick_tokenizer()
    settings = RolloutConfig(max_new_tokens=40, environment_timeout_s=None)
    evaluator.rollout = evaluator.scored = settings
    evaluator.tokenizer, evaluator.environments = tokenizer, EnvironmentPool(environment, settings, tokenizer)
    return evaluator


def test_the_score_is_the_sum_of_the_rewards_of_an_environment_that_gives_them():
    rule = RewardRule(RewardConfig(environment=0.5))
    found = talking(Counter, temperature=1.0, accuracy="environment", rule=rule).score_cache(SPARSE)
    # turn n is rewarded by n, and the third is the last
    assert {sample.score for sample in found.samples} <= {1.0, 1.0 + 2.0, 1.0 + 2.0 + 3.0}
    assert found.row.reward == pytest.approx(sum(sample.score for sample in found.samples) / 24 / 2)
    assert found.row.reward > 1.5
    assert found.row.accuracy == 1
    by_task = talking(Counter, temperature=1.0).score_cache(SPARSE)
    assert {sample.score for sample in by_task.samples} == {0.0, 1.0}


def test_failed_environments_have_no_score_where_they_give_it():
    by_environment = {"temperature": 1.0, "accuracy": "environment"}
    found = talking(Crashing, **by_environment, rule=failing_up_to(1.0)).score_cache(SPARSE)
    assert (0.0, None) in {(sample.score, sample.reward) for sample in found.samples}
    with pytest.raises(RewardsFailedError, match="completions have no score"):
        talking(Crashing, **by_environment, rule=failing_up_to(0.0)).score_cache(SPARSE)


@pytest.mark.parametrize("max_failed", [0.0, 1.0])
def test_a_response_whose_environment_failed_has_no_score(max_failed):
    evaluator = talking(Crashing, rule=failing_up_to(max_failed))
    if max_failed == 0:
        with pytest.raises(RewardsFailedError, match="completions have no score"):
            evaluator.score_cache(SPARSE)
    else:
        evaluator.task = FailingOn()
        assert 0 < evaluator.score_cache(SPARSE).row.accuracy < 1


@pytest.mark.parametrize(
    ("own", "policies", "labels"),
    [
        (SPARSE, ["tova"], ["dense", "snapkv 7+2", "tova 7+2", "tova 5+2"]),
        (SPARSE, ["dense"], ["dense", "snapkv 7+2"]),
        (SPARSE, None, ["dense", "snapkv 7+2", "snapkv 5+2"]),
        (CacheSpec(policy="dense", budget=7, interval=2, sink=1, window=2, dtype="int8"), ["tova"],
         ["dense", "dense int8", "tova 7+2 int8", "tova 5+2 int8"]),
    ],
)  # fmt: skip
def test_the_cache_that_a_run_was_trained_under_is_always_evaluated(own, policies, labels):
    assert [cache.label for cache in caches_to_evaluate(own, [5], policies)] == labels


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_rounded_dense_cache_is_evaluated_beside_the_exact_one(dtype):
    own = replace(CacheSpec.dense(), dtype=dtype)
    labels = [cache.label for cache in caches_to_evaluate(own, [8])]
    assert labels == (["dense"] if dtype is None else ["dense", "dense int8"])
    sparse = caches_to_evaluate(replace(SPARSE, dtype=dtype), [9])
    assert {cache.dtype for cache in sparse if not cache.is_dense} == {dtype}


def test_the_kl_of_a_quantized_cache_counts_its_rounding():
    exact, rounded = (
        make_evaluator().score_cache(replace(CacheSpec.dense(), dtype=dtype)).row for dtype in (None, "int4")
    )
    assert abs(exact.kl) < 1e-6 < 1e-5 < abs(rounded.kl)
    assert rounded.kv_bytes < exact.kv_bytes
