"""RolloutDataModule: each epoch of its loader is one iteration of RL, sampled by the policy as it is now."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.credit import Credit, CreditRule, Experience
from lit_rlkv.data.phases import Phases
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.rewarding import RewardConfig, RewardRule
from lit_rlkv.data.settings import KLConfig, SamplingConfig, UpdateConfig
from lit_rlkv.data.tasks import Task
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.masking import masked_sum
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.scoring import score_rollout
from lit_rlkv.objectives.aggregate import AGGREGATIONS
from lit_rlkv.objectives.corrections import Correction
from lit_rlkv.objectives.kl import ESTIMATORS, adapted_weight, k1
from lit_rlkv.rewards import score
from lit_rlkv.rng import stream
from lit_rlkv.rollout import generate
from lit_rlkv.types import Problem, Rewards, Rollout, TrainBatch


@dataclass(frozen=True)
class Part:
    """Whole groups of a rollout, with the denominators of one optimizer step on all of it.

    Gradients of parts add up to that of the step.
    """

    batches: Sequence[TrainBatch]
    """In micro-batches for the policy alone, no larger than those of training; the last one `ends_step`."""
    n_groups: int
    """Groups that the policy's loss counts: those of which it leaves out everything are not among them."""
    share: float
    """Of the denominator of the policy's loss: of the tokens, responses or pairs that it counts."""
    n_prompts: int
    """All groups, whatever the policy's loss leaves out."""
    action_share: float
    """Of all actions that are learned from, the denominator of what callbacks add to the loss."""


Split = Callable[[Experience, int], Iterator[Part]]
"""Cuts a rollout, or a changed copy of its experience, into so many parts."""


class RolloutDataModule(L.LightningDataModule):
    """Prompts, rollout, reward and credit, done once each time a loader is asked for.

    Every draw comes from a stream named by seed and iteration, and the prompts from the source's cursor.
    These, the parameters, the KL's weight and the moments of the rewards are the whole state of training.
    """

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        source: PromptSource,
        cache: CacheSpec,
        correction: Correction,
        credit: CreditRule,
        sampling: SamplingConfig,
        update: UpdateConfig,
        seed: int,
        kl: KLConfig | None = None,
        reward: RewardConfig | None = None,
        on_rollout_end: Sequence[Callable[[Experience], None]] = (),
        on_update_start: Sequence[Callable[[Experience, Split], None]] = (),
        phases: Phases | None = None,
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
        self.kl = kl or KLConfig()
        self.kl_weight = self.kl.weight
        self.reward = RewardRule(reward or RewardConfig())
        self.iteration = 0
        self.on_rollout_end = list(on_rollout_end)
        self.on_update_start = list(on_update_start)
        self.phases = phases or Phases()

    def train_dataloader(self) -> DataLoader[TrainBatch]:
        """The minibatches of the next iteration, in the order of their updates."""
        experience = self.collect()
        for listener in self.on_rollout_end:
            listener(experience)
        for watcher in self.on_update_start:
            watcher(experience, self.parts)
        self.iteration += 1
        return DataLoader(_Stream(self, experience), batch_size=None)

    @torch.no_grad()
    def collect(self) -> Experience:
        """Sample, score and judge one batch of responses."""
        group_size = self.sampling.group_size
        problems = [p for p in self.source.take(self.sampling.n_prompts) for _ in range(group_size)]
        with self.phases("rollout", self.iteration):
            rollout = self._sample(problems[::group_size])
        is_action = rollout.is_action
        with self.phases("score", self.iteration):
            scores = self._scores(rollout)
        old_logps = scores.get("policy", rollout.sampler_logps)
        ref_logps = scores.get("reference")
        has_eos = ((rollout.token_ids == self.tokenizer.eos_token_id) & is_action).any(dim=1)
        with self.phases("reward", self.iteration):
            completions = decode_completions(self.tokenizer, rollout.token_ids, is_action)
            rewards = self._rewards(problems, completions, scores.get("reward"), has_eos)
        kl_weight = self.kl_weight
        self._steer_kl(old_logps, ref_logps, is_action)
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
            kl_penalty=self._kl_penalty(old_logps, ref_logps, is_action, kl_weight),
            values=scores.get("value"),
            weights=self.correction.weigh(old_logps - rollout.sampler_logps, is_action),
            group_size=group_size,
            kl_estimator=self.kl.estimator if self.kl.place == "reward" else None,
        )

    def _sample(self, problems: Sequence[Problem]) -> Rollout:
        """A group of responses to each problem, side by side."""
        config, device = self.sampling, self.roles.backbone("policy").device
        prompts = encode_prompts(self.tokenizer, [p.prompt for p in problems]).to(device)
        with acting_as(self.roles, "policy") as backbone:
            return generate(
                backbone,
                prompts.token_ids,
                prompts.attention_mask,
                cache=self.cache,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                temperature=config.temperature,
                generator=stream(self.seed, "sample", self.iteration, self.source.rank, device=device),
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
        learned: Float[Tensor, " batch"] | None,
        has_eos: Bool[Tensor, " batch"],
    ) -> Rewards:
        """What the verifier and the reward role make of the completions."""
        components = {}
        if self.task.is_verifiable:
            verified = score(self.task.score, problems, completions)
            components = {name: value.to(has_eos.device) for name, value in verified.components.items()}
        if learned is not None:
            components["learned"] = learned
        return self.reward(components, has_eos)

    def _kl_penalty(
        self, old_logps: Tensor, ref_logps: Tensor | None, is_action: Tensor, weight: float | int
    ) -> Float[Tensor, "batch seq"]:
        """β·KL of each action where the reward pays for it."""
        if ref_logps is None or self.kl.place != "reward":
            return torch.zeros_like(old_logps)
        return kl_penalty(self.kl.estimator, old_logps, ref_logps, is_action, weight)

    def _steer_kl(self, old_logps: Tensor, ref_logps: Tensor | None, is_action: Tensor) -> None:
        """Set the weight of the next iteration."""
        is_still = self.iteration < self.update.critic_warmup  # the policy cannot answer yet
        if self.kl.target is None or ref_logps is None or is_still:
            return
        n = len(old_logps)
        kl = float(masked_sum(k1(old_logps, ref_logps), is_action)) / n
        self.kl_weight = adapted_weight(self.kl_weight, kl, n, target=self.kl.target, horizon=self.kl.horizon)

    def minibatches(self, experience: Experience) -> Iterator[TrainBatch]:
        """The optimizer steps of an iteration, each in its micro-batches."""
        whole, credit = self._credited(experience)
        update = self.update
        learner_parts = update.learner_parts
        if experience.iteration < update.critic_warmup:
            learner_parts = (update.warmup_part,)
        for epoch in range(update.n_epochs):
            generator = stream(self.seed, "shuffle", experience.iteration, epoch)
            order = torch.randperm(len(credit.units), generator=generator).to(credit.units.device)
            for number, chosen in enumerate(order.tensor_split(update.n_minibatches)):
                is_fresh = epoch == 0 and number == 0
                step = self._step(whole, credit.units[chosen], credit.is_counted)
                yield from self._micro_batches(
                    replace(step, is_fresh=is_fresh),
                    credit.units[chosen],
                    learner_parts,
                    self.update.n_micro_batches,
                )

    def parts(self, experience: Experience, n_parts: int) -> Iterator[Part]:
        """The rollout in parts of whole groups, as near to equal as can be.

        Credit and denominators are those of the whole. What an advantage takes from it, such as the mean and
        standard deviation of whitening, all parts have in common.

        Raises:
            ValueError: there are fewer groups than parts.
        """
        n_groups = len(experience.problems) // experience.group_size
        if not 1 <= n_parts <= n_groups:
            raise ValueError(f"{n_groups} groups cannot be cut into {n_parts} parts; give at most {n_groups}")
        whole, credit = self._credited(experience)
        step = self._step(whole, credit.units, credit.is_counted)
        of_group = credit.units.view(n_groups, -1, credit.units.shape[1])
        n_actions = whole.rollout.is_action[of_group].flatten(1).sum(dim=1)
        by_token = self.update.aggregation == "token"
        sizes = *_sizes(step.loss_weight, of_group, by_token=by_token), n_actions.double() / step.n_actions
        n_units = ceil(ceil(len(credit.units) / self.update.n_minibatches) / self.update.n_micro_batches)
        pieces = [one.tensor_split(n_parts) for one in (of_group, *sizes)]
        for groups, is_counted, share, actions in zip(*pieces, strict=True):
            units = groups.flatten(0, 1)
            batches = self._micro_batches(step, units, (("policy",),), ceil(len(units) / n_units))
            yield Part(
                batches=list(batches),
                n_groups=int(is_counted.sum()),
                share=float(share.sum()),
                n_prompts=len(groups),
                action_share=float(actions.sum()),
            )

    def _credited(self, experience: Experience) -> tuple[TrainBatch, Credit]:
        """The whole rollout as one batch without denominators, and what its actions are worth."""
        rollout, update = experience.rollout, self.update
        if update.mask_truncated:
            is_counted = experience.weights.is_counted & experience.has_eos[:, None]
            experience = replace(experience, weights=replace(experience.weights, is_counted=is_counted))
        credit = self.credit.assign(experience)
        ref_logps = experience.ref_logps
        whole = TrainBatch(
            rollout=rollout,
            advantages=credit.advantages,
            old_logps=experience.old_logps,
            ref_logps=torch.zeros_like(experience.old_logps) if ref_logps is None else ref_logps,
            correction=experience.weights.weight,
            loss_weight=torch.zeros_like(rollout.sampler_logps),
            kl_weight=experience.kl_weight if self.kl.place == "loss" else 0.0,
            n_actions=0,
            is_fresh=True,
            ends_step=True,
            old_values=experience.values,
            returns=credit.returns,
        )
        return whole, credit

    def _step(self, whole: TrainBatch, units: Tensor, is_counted: Bool[Tensor, "batch seq"]) -> TrainBatch:
        """The rollout with the denominators of the optimizer step that learns from these units."""
        rows = units.flatten()
        loss_weight = torch.zeros_like(whole.loss_weight)
        aggregate = AGGREGATIONS[self.update.aggregation]
        loss_weight[rows] = aggregate(is_counted[rows], self.sampling.max_new_tokens)
        return replace(
            whole,
            loss_weight=loss_weight,
            n_actions=int(whole.rollout.is_action[rows].sum()),
            n_pairs=_n_pairs(loss_weight, units),
        )

    def _micro_batches(
        self, step: TrainBatch, units: Tensor, learner_parts: tuple[tuple[str, ...], ...], n: int
    ) -> Iterator[TrainBatch]:
        parts = [part.flatten() for part in units.tensor_split(n) if len(part)]
        for number, part in enumerate(parts):
            rows = step.rows(part)
            for learners in learner_parts:
                is_last = number == len(parts) - 1 and learners == learner_parts[-1]
                yield replace(rows, ends_step=is_last, learners=learners)

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
        return self.module.minibatches(self.experience)


def kl_penalty(
    estimator: str,
    old_logps: Float[Tensor, "batch seq"],
    ref_logps: Float[Tensor, "batch seq"],
    is_action: Bool[Tensor, "batch seq"],
    weight: float | int,
) -> Float[Tensor, "batch seq"]:
    """weight·KL of each action, which the reward pays for; `estimator` is one of `ESTIMATORS`."""
    return weight * ESTIMATORS[estimator](old_logps, ref_logps).masked_fill(~is_action, 0.0)


def _n_pairs(loss_weight: Float[Tensor, "batch seq"], units: Tensor) -> int:
    """Pairs of which both sides count; 0 where a unit is a single row."""
    if units.shape[1] == 1:
        return 0
    return int((loss_weight[units] != 0).any(dim=2).all(dim=1).sum())


def _sizes(
    loss_weight: Float[Tensor, "batch seq"], of_group: Int[Tensor, "group unit member"], *, by_token: bool
) -> tuple[Bool[Tensor, " group"], Float[Tensor, " group"]]:
    """Of each group: whether the policy's loss counts it, and its share of the loss's denominator.

    The denominator is a number of tokens, or of responses; pairs are counted whole or not at all.
    """
    weight = loss_weight[of_group]
    is_unit = (weight != 0).any(dim=3).all(dim=2)
    by_token = by_token and of_group.shape[2] == 1
    count = ((weight != 0).flatten(1) if by_token else is_unit).sum(dim=1)
    return is_unit.any(dim=1), count.double() / count.sum().clamp(min=1)
