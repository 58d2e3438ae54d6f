"""RolloutDataModule: samples with the current policy; each epoch of its loader is one iteration of RL."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool
from lightning import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import is_end
from lit_rlkv.environments.conversations import TextConversations
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.experience.kl_control import KLController
from lit_rlkv.experience.minibatches import MinibatchSplitter, RolloutPart
from lit_rlkv.experience.progress import PhaseProgress
from lit_rlkv.experience.protocols import RolloutModule, RolloutRun
from lit_rlkv.experience.resampling import has_equal_groups, replace_equal_groups
from lit_rlkv.experience.reward import RewardRule, accuracy_component
from lit_rlkv.experience.sample import sample_groups
from lit_rlkv.experience.score import ENTROPY, critic_sees_shadow, score_rollout
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.eviction_logps import count_decisions
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.kv_scorer import kv_scorer_of
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.objectives.corrections import ISWeights, global_is_weights
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.planning.advice import explain_scoring, explain_update
from lit_rlkv.rewards.manager import PendingRewards
from lit_rlkv.rng import derive_seed
from lit_rlkv.rollout.turns import last_turn
from lit_rlkv.trainer import call
from lit_rlkv.types import Problem, Rewards, Rollout, TrainBatch


class RolloutDataModule(L.LightningDataModule):
    """Samples, scores, rewards and splits one rollout each time a loader is requested.

    Random draws depend only on seed and iteration, and prompts on the source's cursor. With the parameters,
    the KL coefficient and the reward's running moments, these are the whole state of training.

    Args:
        run: config, cache, correction, advantage estimator, tokenizer, task, reward functions, environments
            and ranks. Reward functions score a response once it has ended, while others are sampled and the
            roles score.
        module: its policy samples; its roles score, and learn in the parts that it names.
        callbacks: called around and during rollout, score and reward, with each experience before it is cut
            into minibatches, and with the function that splits it into parts; see `RLCallback`.
        tokens_per_pass: most tokens in one forward of scoring and update, padding included.
    """

    def __init__(
        self,
        run: RolloutRun,
        module: RolloutModule,
        callbacks: Sequence[Callback] = (),
        tokens_per_pass: int = TOKENS_PER_PASS,
    ) -> None:
        super().__init__()
        cfg, correction = run.cfg, run.parts.correction
        self.run = run
        self.roles = module.roles
        self.trains_evictions = module.evictions is not None
        self.tokenizer = run.tokenizer
        self.task = run.task
        self.rewards = run.rewards
        self.settings = cfg.rollout
        self.algorithm = cfg.algorithm
        self.roles_config = cfg.roles
        self.callbacks = callbacks
        self.tokens_per_pass = tokens_per_pass
        self.source = PromptSource(
            run.task,
            split="train",
            seed=derive_seed(cfg.seed, "prompts", "rl"),
            curriculum=cfg.algorithm.curriculum,
        )
        sampler_cache = CacheSpec.dense() if correction.samples_dense else run.parts.cache.for_rollouts
        target = cfg.cache.target_overlap
        bounds = None if target is None else cfg.cache.budget_bounds
        self.budget = BudgetController(sampler_cache, target, bounds)
        self.correction = correction
        self.advantage = run.parts.advantage
        self.kl = KLController(cfg.algorithm.kl, cfg.rollout.n_prompts * cfg.algorithm.group_size)
        self.reward = RewardRule(cfg.reward, self.rewards.functions, cfg.rollout.max_new_tokens)
        self.splitter = MinibatchSplitter(run, module, self.advantage, tokens_per_pass)
        self.n_shards = self.splitter.n_shards
        self.iteration = 0
        self._shape = (0, 0)
        """Rows and columns of the latest rollout."""
        self.sources: dict[str, str] = {}
        """Fingerprints of files that a resumed run must find again, kept in its checkpoints."""

    @property
    def cache(self) -> CacheSpec:
        """The cache of the next rollout."""
        return self.budget.cache

    def train_dataloader(self) -> DataLoader[TrainBatch]:
        """Return the minibatches of the next iteration, in the order of their updates."""
        experience = self.collect()
        progress = PhaseProgress("diagnostics", 2 * len(self.callbacks), self.callbacks)
        hooks: dict[str, tuple[Any, ...]] = {
            "on_rollout_end": (experience,),
            "on_update_start": (experience, partial(self._parts, progress)),
        }
        for hook, arguments in hooks.items():
            for callback in self.callbacks:
                call([callback], hook, *arguments)
                progress.advance(1)
        self.iteration += 1
        return DataLoader(_Minibatches(self.splitter, experience), batch_size=None)

    @torch.no_grad()
    def collect(self) -> Experience:
        """Sample, score and reward this rank's share of the responses of one iteration.

        Groups whose rewards are all equal are replaced in at most `algorithm.resample` further rounds.
        """
        experience = self._collect()
        for round_number in range(1, self.algorithm.resample + 1):
            if not has_equal_groups(experience):
                break
            experience = self._resample(experience, round_number)
        # Before that the policy does not learn.
        if self.iteration >= self.algorithm.critic_warmup:
            mask = experience.rollout.response_mask
            self.kl.update(experience.old_logps, experience.ref_logps, mask, self.run.ranks)
        return experience

    def _resample(self, experience: Experience, round_number: int) -> Experience:
        """Replace groups whose rewards are all equal by groups of new prompts."""
        more = self._collect(round_number)
        n_shards = self.n_shards // self.run.ranks.size
        found = replace_equal_groups(experience, more, self.tokenizer.pad_token_id, n_shards)
        rollout = found.rollout
        self._shape = (len(rollout.input_ids), rollout.input_ids.shape[1])
        # Diagnostics know by its being the sampler's that the policy has not scored the rollout.
        old_logps = rollout.rollout_logps if self.correction.bypass_mode else found.old_logps
        found = replace(found, old_logps=old_logps, weights=self._is_weights(old_logps, rollout))
        return replace(found, n_rounds=round_number + 1, curriculum=more.curriculum)

    def _is_weights(self, old_logps: Tensor, rollout: Rollout) -> ISWeights:
        log_ratio = old_logps - rollout.rollout_logps
        return global_is_weights(self.correction.weight_fn, log_ratio, rollout.response_mask, self.run.ranks)

    def _collect(self, round_number: int = 0) -> Experience:
        """Return one round of the iteration."""
        group_size = self.algorithm.group_size
        # 1. sample; reward functions score each response from its end on
        prompts = self._next_prompts()
        problems = [problem for shard in prompts.values() for problem in shard for _ in range(group_size)]
        pending = self.rewards.begin(problems)
        greedy = self.rewards.begin(problems[::group_size] if self.advantage.needs_greedy else ())
        n_responses = len(problems) + len(greedy.problems)
        draw = (self.iteration,) if round_number == 0 else (self.iteration, "round", round_number)
        n_tokens = n_responses * self.settings.max_new_tokens
        with self._phase("rollout", n_tokens) as progress, acting_as(self.roles, "policy") as backbone:
            sample = partial(
                sample_groups, self.run, backbone, self.cache, prompts, on_progress=progress.advance
            )
            rollout, talks = sample(pending, draw)
            found = sample(greedy, ("greedy", *draw), is_greedy=True) if greedy.problems else None
        response_mask = rollout.response_mask
        self._shape = (len(response_mask), response_mask.shape[1])
        # 2. score
        wanted = {*self.roles.needed, *self.advantage.statistics}
        if self.correction.bypass_mode:
            wanted.remove("policy")  # π_old is the sampler
        with self._phase("score", n_responses) as progress:
            scores = self._score(rollout, wanted, progress.advance)
            if found is not None:
                learned = self._score(found[0], wanted & {"reward"}, progress.advance).get("reward")
        # 3. reward
        baseline = None
        with self._phase("reward", len(pending) + len(greedy)) as progress:
            rewarded = partial(self._rewarded, on_progress=progress.advance)
            rewards = rewarded(pending, rollout, talks, scores.get("reward"), group_size)
            if found is not None:
                baseline = rewarded(greedy, *found, learned, 1)
                baseline = baseline.rows(torch.arange(len(problems)) // group_size)
                rewards = replace(rewards, is_failed=_either(rewards.is_failed, baseline.is_failed))
        # 4. importance weights and KL
        old_logps, ref_logps = scores.get("policy", rollout.rollout_logps), scores.get("reference")
        policy = self.roles.backbone("policy")
        scorer = kv_scorer_of(policy) if self.trains_evictions else None
        return Experience(
            iteration=self.iteration,
            problems=problems,
            completions=pending.in_order(),
            rollout=rollout,
            rewards=rewards,
            has_eos=self._ended(rollout, talks),
            old_logps=old_logps,
            ref_logps=ref_logps,
            kl_coef=self.kl.coef,
            kl_penalty=self.kl.penalty(old_logps, ref_logps, response_mask),
            values=scores.get("value"),
            entropy=scores.get(ENTROPY),
            weights=self._is_weights(old_logps, rollout),
            group_size=group_size,
            kl_estimator=self.kl.config.estimator if self.kl.config.place == "reward" else None,
            gamma=self.advantage.gamma,
            is_replayed=self.correction.replays and not self.correction.bypass_mode,
            transcripts=[text for talk in talks for text in talk.transcripts],
            ranks=self.run.ranks,
            budget=self.budget.controlled,
            n_rounds=1 if self.algorithm.resample > 0 else None,
            curriculum=self._update_curriculum(problems[::group_size], rewards),
            n_decisions=None if scorer is None else count_decisions(rollout, policy, scorer),
            seed=self.run.cfg.seed,
            greedy_rewards=None if baseline is None else baseline.total,
        )

    def explain_update(self) -> str:
        """Return the text of an out-of-memory error in the updates on the latest rollout."""
        return explain_update(self.roles, self._shape, self.settings, self.tokens_per_pass)

    def tokens_at_once(self) -> int:
        """Return the tokens of the largest pass over the latest rollout."""
        return min(self.tokens_per_pass, math.prod(self._shape))

    def _next_prompts(self) -> dict[int, list[Problem]]:
        """Return this rank's next problems by shard; every shard gets equally many.

        The shards take turns in one stream of problems. Those of a rank are consecutive, so that the rows of
        all ranks have the order of one process.
        """
        n, n_shards = self.settings.n_prompts, self.n_shards
        numbers = range(n_shards)[self.run.ranks.local_rows(n_shards // self.run.ranks.size)]
        places = [place for number in numbers for place in range(number, n, n_shards)]
        problems = iter(self.source.take_places(n, places))
        return {number: list(islice(problems, n // n_shards)) for number in numbers}

    def _update_curriculum(self, problems: Sequence[Problem], rewards: Rewards) -> dict[str, float]:
        """Move the success rates of the problems of all ranks, and return metrics of them."""
        curriculum = self.source.curriculum
        if curriculum is None:
            return {}
        name = accuracy_component(self.reward.config, self.reward.functions, self.task)
        assert name is not None
        scores = rewards.components[name]
        rates = scores.clamp(0, 1).view(len(problems), -1).nanmean(dim=1).tolist()
        found = [(problem.prompt, rate) for problem, rate in zip(problems, rates, strict=True)]
        curriculum.update(each for each in self.run.ranks.all_gather_object(found) if not math.isnan(each[1]))
        return curriculum.metrics()

    def _ended(self, rollout: Rollout, talks: Sequence[TextConversations]) -> Bool[Tensor, " batch"]:
        """Return True for the responses that were not cut at max_new_tokens."""
        is_last = last_turn(rollout.response_mask) & is_end(self.tokenizer, rollout.input_ids)
        has_eos = is_last.any(dim=1)
        return has_eos & ~torch.cat([talk.is_cut for talk in talks]).to(has_eos.device) if talks else has_eos

    def _rewarded(
        self,
        pending: PendingRewards,
        rollout: Rollout,
        talks: Sequence[TextConversations],
        learned: Tensor | None,
        group_size: int,
        on_progress: Callable[[int], object],
    ) -> Rewards:
        is_response = rollout.attention_mask & (rollout.response_mask.cumsum(dim=1) > 0)
        return self.reward.from_completions(
            self.task,
            pending,
            learned,
            talks,
            self._ended(rollout, talks),
            is_response.sum(dim=1),
            group_size,
            self.run.ranks,
            on_progress,
        )

    def _score(
        self, rollout: Rollout, wanted: Collection[str], on_progress: Callable[[int], object]
    ) -> dict[str, Tensor]:
        """Return log-probs, values or rewards by role."""
        replay = self.correction.replays
        # Under an exact cache both views are the same, and roles with the same view share a forward.
        dense_view = replay and self.cache.is_exact
        views = {
            "policy": replay,
            "reference": replay,
            ENTROPY: replay,
            "reward": dense_view,
            "value": critic_sees_shadow(self.roles_config, self.correction, self.cache),
        }
        explain = partial(explain_scoring, self._shape, self.settings, self.tokens_per_pass)
        with explain_out_of_memory(explain, self.tokens_at_once):
            return score_rollout(
                self.roles,
                rollout,
                {role: shadow for role, shadow in views.items() if role in wanted},
                temperature=self.settings.temperature,
                tokens_per_pass=self.tokens_per_pass,
                on_progress=on_progress,
            )

    @contextmanager
    def _phase(self, name: str, n_total: int) -> Iterator[PhaseProgress]:
        call(self.callbacks, "on_phase_start", name, self.iteration)
        yield PhaseProgress(name, n_total, self.callbacks)
        call(self.callbacks, "on_phase_end", name, self.iteration)

    def _parts(self, progress: PhaseProgress, experience: Experience, n_parts: int) -> Iterator[RolloutPart]:
        """Split an experience for a callback, and count each part that it is done with as progress."""
        for number, part in enumerate(self.splitter.parts(experience, n_parts), start=1):
            yield part
            progress.advance_within(number / (n_parts + 1))

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "source": self.source.state_dict(),
            "kl": self.kl.state_dict(),
            "reward": self.reward.state_dict(),
            "budget": self.budget.state_dict(),
            "sources": self.sources,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.iteration = state_dict["iteration"]
        self.source.load_state_dict(state_dict["source"])
        self.kl.load_state_dict(state_dict["kl"])
        self.reward.load_state_dict(state_dict["reward"])
        if "budget" in state_dict:  # not in checkpoints of earlier versions
            self.budget.load_state_dict(state_dict["budget"])


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first | second


class _Minibatches(IterableDataset[TrainBatch]):
    """Builds each micro-batch when it is requested, so that memory holds only one beside the rollout."""

    def __init__(self, splitter: MinibatchSplitter, experience: Experience) -> None:
        self.splitter = splitter
        self.experience = experience

    def __iter__(self) -> Iterator[TrainBatch]:
        return self.splitter.minibatches(self.experience)
