"""RolloutDataModule: each epoch of its loader is one iteration of RL, sampled by the policy as it is now."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.advantages import group
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tasks import Task
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import replay_logps
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.objectives.aggregate import AGGREGATIONS
from lit_rlkv.objectives.corrections import Correction, Weights
from lit_rlkv.rewards import score
from lit_rlkv.rng import stream
from lit_rlkv.rollout import generate
from lit_rlkv.types import Problem, Rewards, Rollout, TrainBatch


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn."""

    n_prompts: int
    """Prompts per iteration; each gets `group_size` responses."""
    group_size: int
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class UpdateConfig:
    """How a rollout is turned into optimizer steps."""

    advantage: str
    aggregation: str
    n_epochs: int = 1
    n_minibatches: int = 1
    """Optimizer steps per epoch over the rollout."""
    n_micro_batches: int = 1
    """Forward and backward passes per optimizer step: less memory, the same gradient."""
    drop_uniform_groups: bool = False
    needs_reference: bool = False


@dataclass(frozen=True)
class Experience:
    """One iteration's rollout with everything that was found out about it, for callbacks to look at."""

    iteration: int
    problems: Sequence[Problem]
    completions: Sequence[str]
    rollout: Rollout
    rewards: Rewards
    advantages: Float[Tensor, "prompt group"]
    old_logps: Float[Tensor, "batch seq"]
    weights: Weights
    group_size: int


class RolloutDataModule(L.LightningDataModule):
    """Prompts, rollout, reward and credit, done once each time a loader is asked for.

    Every draw comes from a stream named by seed and iteration, and the prompts from the source's cursor, so
    these and the parameters are the whole state of training.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        source: PromptSource,
        cache: CacheSpec,
        correction: Correction,
        sampling: SamplingConfig,
        update: UpdateConfig,
        seed: int,
        on_rollout_end: Sequence[Callable[[Experience], None]] = (),
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.task = task
        self.source = source
        self.cache = CacheSpec.dense() if correction.samples_dense else cache
        self.correction = correction
        self.sampling = sampling
        self.update = update
        self.seed = seed
        self.iteration = 0
        self.on_rollout_end = list(on_rollout_end)

    def train_dataloader(self) -> DataLoader[TrainBatch]:
        """The minibatches of the next iteration, in the order of their updates."""
        experience = self.collect()
        for listener in self.on_rollout_end:
            listener(experience)
        batches = list(self.minibatches(experience))
        self.iteration += 1
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    @torch.no_grad()
    def collect(self) -> Experience:
        """Sample, score and judge one batch of responses."""
        config, group_size = self.sampling, self.sampling.group_size
        problems = [p for p in self.source.take(config.n_prompts) for _ in range(group_size)]
        prompts = encode_prompts(self.tokenizer, [p.prompt for p in problems]).to(self.backbone.device)
        with acting_as(self.backbone, "policy"):
            rollout = generate(
                self.backbone,
                prompts.token_ids,
                prompts.attention_mask,
                cache=self.cache,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                temperature=config.temperature,
                generator=stream(
                    self.seed, "sample", self.iteration, self.source.rank, device=self.backbone.device
                ),
            )
            old_logps = self._old_logps(rollout)
        completions = decode_completions(self.tokenizer, rollout.token_ids, rollout.is_action)
        rewards = score(self.task.score, problems, completions)
        advantages = group.ESTIMATORS[self.update.advantage](rewards.total.view(-1, group_size))
        return Experience(
            iteration=self.iteration,
            problems=problems,
            completions=completions,
            rollout=rollout,
            rewards=rewards,
            advantages=advantages,
            old_logps=old_logps,
            weights=self.correction.weigh(old_logps - rollout.sampler_logps, rollout.is_action),
            group_size=group_size,
        )

    def _old_logps(self, rollout: Rollout) -> Float[Tensor, "batch seq"]:
        """π_old under the learner's view; where the sampler's is the same, it has been computed already."""
        if self.correction.replays or self.cache.is_dense:
            return rollout.sampler_logps
        return replay_logps(self.backbone, rollout, shadow=False, temperature=self.sampling.temperature)

    def minibatches(self, experience: Experience) -> Iterator[TrainBatch]:
        """The optimizer steps of an iteration, each in its micro-batches."""
        rollout, update = experience.rollout, self.update
        ref_logps = torch.zeros_like(rollout.sampler_logps)
        if update.needs_reference:
            with torch.no_grad(), acting_as(self.backbone, "reference"):
                ref_logps = replay_logps(
                    self.backbone,
                    rollout,
                    shadow=self.correction.replays,
                    temperature=self.sampling.temperature,
                )
        advantages = experience.advantages.flatten().to(rollout.token_ids.device)
        whole = TrainBatch(
            rollout=rollout,
            advantages=group.broadcast_to_actions(advantages, rollout.is_action),
            old_logps=experience.old_logps,
            ref_logps=ref_logps,
            correction=experience.weights.weight,
            loss_weight=torch.zeros_like(rollout.sampler_logps),
            n_actions=0,
            is_fresh=True,
            ends_step=True,
        )
        is_counted = self._is_counted(experience)
        n_rows = len(rollout.token_ids)
        for epoch in range(update.n_epochs):
            generator = stream(self.seed, "shuffle", experience.iteration, epoch)
            order = torch.randperm(n_rows, generator=generator).to(rollout.token_ids.device)
            for number, rows in enumerate(order.tensor_split(update.n_minibatches)):
                is_fresh = epoch == 0 and number == 0
                yield from self._micro_batches(whole, rows, is_counted, is_fresh)

    def _micro_batches(
        self, whole: TrainBatch, rows: Tensor, is_counted: Bool[Tensor, "batch seq"], is_fresh: bool
    ) -> Iterator[TrainBatch]:
        aggregate = AGGREGATIONS[self.update.aggregation]
        loss_weight = torch.zeros_like(whole.loss_weight)
        loss_weight[rows] = aggregate(is_counted[rows], self.sampling.max_new_tokens)
        n_actions = int(whole.rollout.is_action[rows].sum())
        parts = [part for part in rows.tensor_split(self.update.n_micro_batches) if len(part)]
        for number, part in enumerate(parts):
            yield replace(
                replace(whole, loss_weight=loss_weight).rows(part),
                n_actions=n_actions,
                is_fresh=is_fresh,
                ends_step=number == len(parts) - 1,
            )

    def _is_counted(self, experience: Experience) -> Bool[Tensor, "batch seq"]:
        """Actions that the policy loss counts. The other rows stay in the batch, for distillation."""
        is_counted = experience.weights.is_counted
        if not self.update.drop_uniform_groups:
            return is_counted
        rewards = experience.rewards.total.view(-1, experience.group_size)
        is_kept = group.is_informative(rewards).repeat_interleave(experience.group_size)
        return is_counted & is_kept.to(is_counted.device)[:, None]

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.iteration = state_dict["iteration"]
        self.source.load_state_dict(state_dict["source"])
