"""Score a policy on held-out prompts with one cache."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.data.tokenizers import decode_completions
from lit_rlkv.diagnostics.evictions import misses_keys
from lit_rlkv.environments.conversations import TextConversations
from lit_rlkv.evaluation.perplexity import summed_nll
from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.experience.protocols import RolloutRun
from lit_rlkv.experience.reward import RewardRule, RewardsFailedError, accuracy_component, scored
from lit_rlkv.experience.sample import encode_problems, sample_responses
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policy import Policy
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.packing import TOKENS_PER_PASS, cut_into_passes
from lit_rlkv.non_finite import NonFiniteError
from lit_rlkv.objectives.reduction import masked_mean
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.rewards.verifier import MAX_SCORE
from lit_rlkv.rng import stream
from lit_rlkv.settings import DENSE, Sampling
from lit_rlkv.types import Problem, Rollout, prompt_text

RIGHT = 1.0
"""Lowest score of a response that counts as correct."""


def caches_to_evaluate(
    own: CacheSpec, budgets: Sequence[int], policies: Sequence[str] | None = None
) -> list[CacheSpec]:
    """Return an exact dense cache, then each policy at each budget, with the run's dtype.

    Args:
        own: cache of the run, which is evaluated too, and its budget with the other policies.
        policies: eviction policies; None: the run's.

    Raises:
        ValueError: a budget is too small for the cache's sink and window.
    """
    chosen: Sequence[str | type[Policy] | Policy] = policies or [own.policy]
    options = {own.policy: own.policy_options}  # other policies have other options
    sparse = [
        replace(own, policy=policy, budget=budget, policy_options=options.get(policy, {}))
        for policy in dict.fromkeys(chosen)
        for budget in sorted({*budgets, own.budget}, reverse=True)
        if policy != DENSE
    ]
    rounded = [replace(CacheSpec.dense(), dtype=own.dtype)] if own.is_dense or DENSE in chosen else []
    trained = [] if own.is_dense or own in sparse else [own]
    return list(dict.fromkeys([CacheSpec.dense(), *rounded, *trained, *sparse]))


@dataclass(frozen=True)
class ScoredResponse:
    """A scored response."""

    cache: str
    """Label of the cache."""
    problem: int
    """Index of the problem in the evaluation."""
    sample: int
    """Index of the response to the problem, from 0."""
    prompt: str
    answer: str
    completion: str
    n_tokens: int
    score: float | None
    """By which it counts as correct; 0 where scoring failed, None where nothing says what is correct."""
    reward: float | None
    """Weighted sum of the components of the reward; None if one failed."""


def is_right(sample: ScoredResponse) -> bool:
    """True if a response has full score."""
    return sample.score is not None and sample.score >= RIGHT


@dataclass(frozen=True)
class CacheScore:
    """Result of one cache."""

    row: EvalRow
    samples: list[ScoredResponse]
    """All scored responses; those to one problem are adjacent."""
    rollout: Rollout | None
    """Rollout on which the mismatch was measured; None on ranks other than 0."""


@dataclass(frozen=True)
class _Answered:
    """Results of one batch."""

    number: int
    samples: list[ScoredResponse]
    n_failed: int
    n_affected: int
    """Responses that lost keys."""
    learned: float
    """Sum of the reward role's scores."""
    kv_bytes: int


class Evaluator:
    """Evaluates the policy on a list of held-out problems, with the reward role's scores if there is one.

    Ranks share the batches, and rank 0 measures the mismatch; every rank gets the result.

    Responses that are scored are sampled as `run.cfg.evaluation` says. Greedy decoding has no log-probs, so
    mismatch and replay gap are measured on responses sampled as in `run.cfg.rollout`. Of the reward functions
    those with a weight and the one of the accuracy are asked.

    Args:
        run: config, tokenizer, task, reward functions, environments and ranks.
        problems: problems, the same on every rank.
        n_samples: responses to each prompt.
        batch_size: most responses sampled at a time.
        tokens_per_pass: most tokens of a forward, padding included.
        texts: token ids of texts whose perplexity is measured, each of at least two tokens.
    """

    def __init__(
        self,
        run: RolloutRun,
        roles: Roles,
        problems: Sequence[Problem],
        n_samples: int = 1,
        batch_size: int = 512,
        tokens_per_pass: int = TOKENS_PER_PASS,
        texts: Sequence[list[int]] = (),
    ) -> None:
        cfg = run.cfg
        self.roles = roles
        self.tokenizer = run.tokenizer
        self.task = run.task
        self.rewards = run.rewards
        self.environments = run.environments
        self.ranks = run.ranks
        self.rule = RewardRule(cfg.reward, self.rewards.functions)
        self.accuracy = accuracy_component(cfg.reward, self.rewards.functions, self.task)
        """Component of the reward by which responses count as correct; None: there is no accuracy."""
        self.problems = problems
        self.config = cfg.evaluation
        self.rollout = cfg.rollout
        self.scored = replace(cfg.rollout, replay_routing=False)
        self.seed = cfg.seed
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.tokens_per_pass = tokens_per_pass
        self.texts = texts

    @property
    def n_tokens(self) -> int:
        """Most tokens that this rank samples for one cache, for the mismatch too."""
        own = (batch for _, batch in self._own_batches())
        n_responses = sum((stop - start) * (last - first) for start, stop, first, last in own)
        if self.ranks.rank == 0:
            n_responses += len(self.problems[: self.config.n_mismatch])
        return n_responses * self.rollout.max_new_tokens

    @torch.no_grad()
    def score_cache(self, cache: CacheSpec, on_progress: Callable[[int], object] | None = None) -> CacheScore:
        """Return accuracy and mismatch with one cache.

        Args:
            on_progress: called with the number of further tokens; they add up to `n_tokens` before the end.

        Raises:
            NonFiniteError: the policy has diverged.
            MemoryExhaustedError: too little memory; the message names settings to lower.
            RewardsFailedError: more completions than `reward.max_failed` allows have no score.
        """
        at_once = self.batch_size
        with explain_out_of_memory(
            lambda: (
                f"out of memory in the evaluation of cache {cache.label}, {at_once} responses at a time; "
                f"lower evaluation.batch_size={at_once} (batch_size of lit_rlkv.evaluate)"
            )
        ):
            return self._score_cache(cache, on_progress)

    def _score_cache(self, cache: CacheSpec, on_progress: Callable[[int], object] | None) -> CacheScore:
        n = len(self.problems)
        n_scored = n * self.n_samples
        own = [self._answer(cache, batch, on_progress) for batch in self._own_batches()]
        rollout, measured = None, []
        if self.ranks.rank == 0:
            rollout, *mismatch = self._mismatch(cache, on_progress)
            measured = [mismatch]
        batches = sorted(self.ranks.all_gather_object(own), key=lambda batch: batch.number)
        ((kl, replay_gap),) = self.ranks.all_gather_object(measured)
        if not math.isfinite(kl):
            raise NonFiniteError(
                f"the policy's log-probs are not finite with cache {cache.label}, so its training has "
                "diverged; evaluate an earlier checkpoint"
            )
        samples = [sample for batch in batches for sample in batch.samples]
        samples.sort(key=lambda sample: (sample.problem, sample.sample))
        n_failed, max_failed = sum(batch.n_failed for batch in batches), self.rule.config.max_failed
        if n_failed > max_failed * n_scored:
            raise RewardsFailedError(
                f"{n_failed} of {n_scored} completions have no score, more than reward.max_failed="
                f"{max_failed} allows; see fit.log for the errors of reward.accuracy or of the "
                f"environment, or scale the task's score, a number of size at most {MAX_SCORE:g}"
            )
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        row = EvalRow(
            cache=cache.label,
            budget=None if cache.is_dense else cache.budget,
            accuracy=None if self.accuracy is None else sum(map(is_right, samples)) / n_scored,
            n_problems=n,
            mean_length=sum(sample.n_tokens for sample in samples) / n_scored,
            kv_bytes=max(batch.kv_bytes for batch in batches),
            kl=kl,
            replay_gap=replay_gap,
            learned_reward=(
                sum(batch.learned for batch in batches) / n_scored if "reward" in self.roles.needed else None
            ),
            reward=sum(rewards) / len(rewards) if rewards else None,
            affected=sum(batch.n_affected for batch in batches) / n_scored,
            perplexity=self._perplexity(cache),
        )
        return CacheScore(row, samples, rollout)

    def _own_batches(self) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """Yield this rank's batches, each with its number among all batches."""
        # Rank 0 comes last, because it also measures the mismatch.
        first = (self.ranks.rank - 1) % self.ranks.size
        return islice(enumerate(self._batches()), first, None, self.ranks.size)

    def _mismatch(
        self, cache: CacheSpec, on_progress: Callable[[int], object] | None
    ) -> tuple[Rollout, float, float]:
        """Return a rollout, and its KL and replay gap; on one rank only, as a rollout has one generator."""
        problems = self.problems[: self.config.n_mismatch]
        start = len(self.problems)
        rollout, _ = self._generate(
            problems, cache, self.rollout, self.rollout, start, on_progress=on_progress, as_rollout=True
        )
        shadow = self._scores(rollout, "policy", shadow=True)
        dense = shadow if cache.is_exact else self._scores(rollout, "policy")
        kl = masked_mean(rollout.rollout_logps - dense, rollout.response_mask)
        return rollout, float(kl), float((shadow - rollout.rollout_logps).abs().max())

    def _perplexity(self, cache: CacheSpec) -> float | None:
        """Return exp of the mean −log p of all tokens of the texts but each first; None without texts."""
        if not self.texts:
            return None
        lengths = torch.tensor([len(text) for text in self.texts])
        cut = cut_into_passes(lengths, self.tokens_per_pass)
        passes = [part.tolist() for rows in cut for part in torch.split(rows, self.batch_size)]
        own = []
        with acting_as(self.roles, "policy") as backbone:
            for number in range(self.ranks.rank, len(passes), self.ranks.size):
                texts = [self.texts[row] for row in passes[number]]
                generator = stream(self.seed, "perplexity", cache.label, number, device=backbone.device)
                own.append((number, summed_nll(backbone, texts, cache, generator)))
        # In the order of the passes, so that the sum does not depend on the number of ranks.
        total = sum(nll for _, nll in sorted(self.ranks.all_gather_object(own)))
        return float(torch.tensor(total / int((lengths - 1).sum())).exp())

    def _answer(
        self,
        cache: CacheSpec,
        batch: tuple[int, tuple[int, int, int, int]],
        on_progress: Callable[[int], object] | None,
    ) -> _Answered:
        """Sample and score one batch."""
        number, (start, stop, first, last) = batch
        problems = self.problems[start:stop]
        n_samples = last - first
        rollout, talk = self._generate(
            problems, cache, self.scored, self.config, start, first, n_samples, on_progress
        )
        completions = decode_completions(self.tokenizer, rollout.input_ids, rollout.response_mask)
        places = [(problem, sample) for problem in range(start, stop) for sample in range(first, last)]
        asked = [self.problems[problem] for problem, _ in places]
        functions = self.rule.functions.items()
        names = [name for name, function in functions if function.weight != 0 or name == self.accuracy]
        learned = self._scores(rollout, "reward").float().cpu() if "reward" in self.roles.needed else None
        pending = self.rewards.ask(asked, completions, names)
        talks = [] if talk is None else [talk]
        components, _ = scored(self.task, pending, learned, talks)
        rewards = self.rule.weighted(components)
        scores = rewards if self.accuracy is None else components[self.accuracy]
        if talk is not None:  # a response whose environment failed has no score
            scores = scores.masked_fill(talk.returns.isnan(), torch.nan)
        lengths = rollout.response_mask.sum(dim=1).tolist()
        shown = [None] * len(asked) if self.accuracy is None else scores.nan_to_num(nan=0.0).tolist()
        given = [None if math.isnan(reward) else reward for reward in rewards.tolist()]
        samples = [
            ScoredResponse(
                cache.label, *place, prompt_text(problem.prompt), problem.answer, completion, n_tokens, *score
            )
            for place, problem, completion, n_tokens, score in zip(
                places, asked, completions, lengths, zip(shown, given, strict=True), strict=True
            )
        ]
        return _Answered(
            number,
            samples,
            n_failed=int(scores.isnan().sum()),
            n_affected=int(misses_keys(rollout).any(dim=1).sum()),
            learned=0.0 if learned is None else float(learned.sum()),
            kv_bytes=rollout.kv_bytes,
        )

    def _batches(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the problems [start, stop) of each batch and their samples [first, last).

        Many samples of one problem are drawn in several batches, so that no batch exceeds `batch_size`.
        """
        n_samples, batch_size = self.n_samples, self.batch_size
        n_together = max(batch_size // n_samples, 1)
        for start in range(0, len(self.problems), n_together):
            stop = min(start + n_together, len(self.problems))
            for first in range(0, n_samples, batch_size):
                yield start, stop, first, min(first + batch_size, n_samples)

    def _scores(self, rollout: Rollout, role: str, *, shadow: bool = False) -> Tensor:
        """Return log-probs [batch, seq] of the policy, or the reward role's rewards [batch]."""
        scores = score_rollout(
            self.roles,
            rollout,
            {role: shadow},
            temperature=self.rollout.temperature,
            tokens_per_pass=self.tokens_per_pass,
        )
        return scores[role]

    def _generate(
        self,
        problems: Sequence[Problem],
        cache: CacheSpec,
        settings: RolloutConfig,
        sampling: Sampling,
        start: int,
        first: int = 0,
        n_samples: int = 1,
        on_progress: Callable[[int], object] | None = None,
        as_rollout: bool = False,
    ) -> tuple[Rollout, TextConversations | None]:
        rounds = () if first == 0 else (first,)
        prompts, talk = encode_problems(self.tokenizer, self.environments, problems, n_samples)
        with acting_as(self.roles, "policy") as backbone:
            names = ("evaluate", cache.label, start, *rounds)
            rollout = sample_responses(
                backbone,
                self.tokenizer,
                prompts,
                replace(settings, max_rows=max(self.batch_size, n_samples)),
                cache=cache.for_rollouts if as_rollout else cache,
                generator=stream(self.seed, *names, device=backbone.device),
                num_return_sequences=n_samples,
                on_progress=on_progress,
                conversations=talk,
                sampling=sampling,
            )
        return rollout, talk
