"""RolloutDataModule: each epoch of its loader is one iteration of RL, sampled by the policy as it is now."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts, is_end, padded
from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.experience.advantages import AdvantageEstimator, Experience
from lit_rlkv.experience.memory import explain_rollout, explain_scoring, explain_update
from lit_rlkv.experience.minibatches import Split, Steps
from lit_rlkv.experience.phases import Phases
from lit_rlkv.experience.reward import RewardConfig, RewardRule
from lit_rlkv.experience.sample import sample_responses
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.experience.settings import KLConfig, SamplingConfig, UpdateConfig
from lit_rlkv.experience.shards import joined
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.objectives.corrections import Correction, global_is_weights
from lit_rlkv.objectives.kl import adapted_weight, k1, kl_penalty
from lit_rlkv.objectives.masking import masked_sum
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.rewards import RewardManager, score
from lit_rlkv.rewards.manager import PendingRewards
from lit_rlkv.rng import stream
from lit_rlkv.tasks import Task
from lit_rlkv.types import Problem, PromptBatch, Rewards, Rollout, TrainBatch


class RolloutDataModule(L.LightningDataModule):
    """Prompts, rollout, reward and credit, done once each time a loader is asked for.

    Every draw comes from a stream named by seed and iteration, and the prompts from the source's cursor.
    These, the parameters, the KL's weight and the moments of the rewards are the whole state of training.

    Args:
        roles: those that the run needs; the policy of them samples.
        source: of prompts; on several ranks it gives each its own.
        cache: that the policy samples with, unless `correction` samples densely.
        correction: the arm: what the sampler keeps, what the learner sees, how the mismatch weighs.
        credit: from rewards to advantages; the module's `advantage_estimator`.
        kl: to the reference; None: none of it.
        reward: what makes up the reward; None: the verifier's score alone.
        panel: of reward functions, asked while the roles score; None makes one of those in `reward`.
        on_rollout_end: called with each experience before it is cut into steps.
        on_update_start: called next, with what cuts it into parts.
        phases: told when rollout, score and reward begin and end.
        ranks: that share the responses of a batch.
    """

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        source: PromptSource,
        cache: CacheSpec,
        correction: Correction,
        credit: AdvantageEstimator,
        sampling: SamplingConfig,
        update: UpdateConfig,
        seed: int,
        kl: KLConfig | None = None,
        reward: RewardConfig | None = None,
        panel: RewardManager | None = None,
        on_rollout_end: Sequence[Callable[[Experience], None]] = (),
        on_update_start: Sequence[Callable[[Experience, Split], None]] = (),
        phases: Phases | None = None,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        super().__init__()
        self.roles = roles
        self.tokenizer = tokenizer
        self.task = task
        self.source = source
        self.cache = CacheSpec.dense() if correction.samples_dense else cache
        self.correction = correction
        self.credit = credit.for_task(task)
        self.sampling = sampling
        self.update = update
        self.seed = seed
        self.ranks = ranks
        self.n_shards = sampling.n_shards or ranks.size
        self.kl = kl or KLConfig()
        self.kl_weight = self.kl.weight
        self.reward = RewardRule(reward or RewardConfig())
        self.panel = panel or RewardManager(self.reward.config.functions)
        self.steps = Steps(
            self.credit,
            update,
            max_new_tokens=sampling.max_new_tokens,
            has_kl_loss=self.kl.place == "loss",
            seed=seed,
            n_shards=self.n_shards,
        )
        self.iteration = 0
        self._shape = (0, 0)
        """Rows and columns of the latest rollout."""
        self.on_rollout_end = list(on_rollout_end)
        self.on_update_start = list(on_update_start)
        self.phases = phases or Phases()

    def train_dataloader(self) -> DataLoader[TrainBatch]:
        """The minibatches of the next iteration, in the order of their updates."""
        experience = self.collect()
        for listener in self.on_rollout_end:
            listener(experience)
        for watcher in self.on_update_start:
            watcher(experience, self.steps.parts)
        self.iteration += 1
        return DataLoader(_Stream(self, experience), batch_size=None)

    @torch.no_grad()
    def collect(self) -> Experience:
        """Sample, score and judge this rank's share of one batch of responses."""
        group_size = self.sampling.group_size
        shards = self._shards()
        problems = [problem for shard in shards.values() for problem in shard for _ in range(group_size)]
        with self.phases("rollout", self.iteration):
            rollout = self._sample(shards)
        response_mask = rollout.response_mask
        self._shape = (len(response_mask), response_mask.shape[1])
        completions = decode_completions(self.tokenizer, rollout.input_ids, response_mask)
        asked = self.panel.ask(problems, completions)  # they think while the roles score
        with self.phases("score", self.iteration):
            scores = self._scores(rollout)
        old_logps = scores.get("policy", rollout.rollout_logps)
        ref_logps = scores.get("reference")
        has_eos = (is_end(self.tokenizer, rollout.input_ids) & response_mask).any(dim=1)
        with self.phases("reward", self.iteration):
            rewards = self._rewards(problems, completions, asked, scores.get("reward"), has_eos)
        kl_weight = self.kl_weight
        self._steer_kl(old_logps, ref_logps, response_mask)
        return Experience(
            iteration=self.iteration,
            problems=problems,
            completions=completions,
            rollout=rollout,
            rewards=rewards,
            has_eos=has_eos,
            old_logps=old_logps,
            ref_logps=ref_logps,
            kl_weight=kl_weight,
            kl_penalty=self._kl_penalty(old_logps, ref_logps, response_mask, kl_weight),
            values=scores.get("value"),
            weights=global_is_weights(
                self.correction.weigh, old_logps - rollout.rollout_logps, response_mask, self.ranks
            ),
            group_size=group_size,
            kl_estimator=self.kl.estimator if self.kl.place == "reward" else None,
            verdicts=_on(response_mask.device, self.credit.judge_all(problems, completions, group_size)),
            gamma=self.credit.gamma,
            ranks=self.ranks,
        )

    def explain_update(self) -> str:
        """What is said where the updates on the latest rollout find too little memory."""
        return explain_update(self.roles, self._shape, self.sampling, self.update)

    def _shards(self) -> dict[int, list[Problem]]:
        """This rank's next problems by the shard that they belong to, of which every rank has as many."""
        n_ranks = self.ranks.size
        problems = self.source.take(self.sampling.n_prompts // n_ranks)
        # The ranks take turns in one stream of problems, and so do the shards.
        numbers = range(self.ranks.rank, self.n_shards, n_ranks)
        return {number: problems[place :: len(numbers)] for place, number in enumerate(numbers)}

    def _sample(self, shards: Mapping[int, Sequence[Problem]]) -> Rollout:
        """A group of responses to each problem, side by side, one shard after the other."""
        texts = {number: [p.prompt for p in problems] for number, problems in shards.items()}
        encoded = {number: encode_prompts(self.tokenizer, prompts) for number, prompts in texts.items()}
        # Columns are common to all ranks, and so is what eviction draws.
        width = self.ranks.largest(max(prompts.input_ids.shape[1] for prompts in encoded.values()))
        pad = self.tokenizer.pad_token_id
        rollouts = [self._sample_shard(number, padded(part, width, pad)) for number, part in encoded.items()]
        n_columns = self.ranks.largest(max(rollout.input_ids.shape[1] for rollout in rollouts))
        return joined(rollouts, n_columns, pad)

    def _sample_shard(self, number: int, prompts: PromptBatch) -> Rollout:
        config = self.sampling
        shape = (len(prompts.input_ids), prompts.input_ids.shape[1])
        explained = explain_out_of_memory(lambda: explain_rollout(backbone, self.cache, shape, config))
        with acting_as(self.roles, "policy") as backbone, explained:
            return sample_responses(
                backbone,
                self.tokenizer,
                prompts,
                cache=self.cache,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                generator=stream(self.seed, "sample", self.iteration, number, device=backbone.device),
                n_samples=config.group_size,
                max_rows=config.max_rows,
                cuda_graph=config.cuda_graph,
            )

    def _scores(self, rollout: Rollout) -> dict[str, Tensor]:
        """What the roles say of the rollout. π_old is the sampler where their views are the same."""
        sees_same = self.correction.replays or self.cache.is_dense
        # Where nothing dies both views are one, and roles that ask for either may share a forward.
        dense_view = self.correction.replays and self.cache.is_dense
        views = {
            "policy": False,
            "reference": self.correction.replays,
            "reward": dense_view,
            "value": self.sampling.value_shadow,
        }
        wanted = {role for role in self.roles.needed if role != "policy" or not sees_same}
        with explain_out_of_memory(lambda: explain_scoring(self._shape, self.sampling)):
            return score_rollout(
                self.roles,
                rollout,
                {role: shadow for role, shadow in views.items() if role in wanted},
                temperature=self.sampling.temperature,
                rows_per_pass=self.sampling.rows_per_pass,
                stacks_passes=self.sampling.stacks_passes,
            )

    def _rewards(
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        asked: PendingRewards,
        learned: Float[Tensor, " batch"] | None,
        has_eos: Bool[Tensor, " batch"],
    ) -> Rewards:
        """What the verifier, the reward role and the functions make of the completions."""
        components = {}
        if self.task.is_verifiable:
            verified = score(self.task.score, problems, completions)
            components = {name: value.to(has_eos.device) for name, value in verified.components.items()}
        if learned is not None:
            components["learned"] = learned
        answers = asked.collect()
        components |= {name: value.to(has_eos.device) for name, value in answers.scores.items()}
        errors = dict(self.ranks.gather_list([*answers.errors.items()]))
        gathered = {name: self.ranks.gather(value) for name, value in components.items()}
        rewards = self.reward(gathered, self.ranks.gather(has_eos), self.sampling.group_size, errors)
        return rewards.rows(self.ranks.mine(len(problems)))

    def _kl_penalty(
        self, old_logps: Tensor, ref_logps: Tensor | None, response_mask: Tensor, weight: float | int
    ) -> Float[Tensor, "batch seq"]:
        """β·KL of each action where the reward pays for it."""
        if ref_logps is None or self.kl.place != "reward":
            return torch.zeros_like(old_logps)
        return kl_penalty(self.kl.estimator, old_logps, ref_logps, response_mask, weight)

    def _steer_kl(self, old_logps: Tensor, ref_logps: Tensor | None, response_mask: Tensor) -> None:
        """Set the weight of the next iteration."""
        is_still = self.iteration < self.update.critic_warmup  # the policy cannot answer yet
        if self.kl.target is None or ref_logps is None or is_still:
            return
        sums = self.ranks.gather(masked_sum(k1(old_logps, ref_logps), response_mask)[None])
        n = len(old_logps) * self.ranks.size
        kl = float(sums.sum()) / n
        self.kl_weight = adapted_weight(self.kl_weight, kl, n, target=self.kl.target, horizon=self.kl.horizon)

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "source": self.source.state_dict(),
            "kl_weight": self.kl_weight,
            "reward": self.reward.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.iteration = state_dict["iteration"]
        self.source.load_state_dict(state_dict["source"])
        self.kl_weight = state_dict["kl_weight"]
        self.reward.load_state_dict(state_dict["reward"])


class _Stream(IterableDataset[TrainBatch]):
    """Cuts each micro-batch when it is asked for, so that one of them is held beside the rollout."""

    def __init__(self, module: RolloutDataModule, experience: Experience) -> None:
        self.module = module
        self.experience = experience

    def __iter__(self) -> Iterator[TrainBatch]:
        return self.module.steps.minibatches(self.experience)


def _on(device: torch.device, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to(device)
