"""Split the experience of all ranks into optimizer steps; each rank trains on its own rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.config.schema import AlgorithmConfig
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.experience.advantages import AdvantageEstimator, Advantages, PairAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.protocols import RolloutModule, RolloutRun
from lit_rlkv.models.packing import TOKENS_PER_PASS, cut_into_passes, packed
from lit_rlkv.objectives.reduction import AGGREGATIONS
from lit_rlkv.rng import stream
from lit_rlkv.types import TrainBatch


@dataclass(frozen=True)
class RolloutPart:
    """Whole groups of a rollout, with the denominators of one optimizer step on the whole rollout.

    The gradients of all parts add up to the gradient of the step.
    """

    batches: Sequence[TrainBatch]
    """Micro-batches for the policy, no larger than in training; the last one has `ends_step`."""
    n_groups: int
    """Groups with at least one token in the policy's loss."""
    share: float
    """Share of the policy loss's denominator (tokens, responses or pairs)."""
    n_prompts: int
    """All groups, also those without a token in the policy's loss."""
    token_share: float
    """Share of all response tokens, which are the denominator of callbacks' loss terms."""


RolloutSplit = Callable[[Experience, int], Iterator[RolloutPart]]
"""Splits an experience, or a changed copy of it, into a number of parts."""


def check_minibatches(
    advantage: AdvantageEstimator, algorithm: AlgorithmConfig, n_prompts: int, n_shards: int = 1
) -> None:
    """Check that the responses or pairs of each shard suffice for the minibatches.

    Raises:
        ValueError: they do not.
    """
    is_pairwise = isinstance(advantage, PairAdvantage)
    n_units = n_prompts // n_shards * (1 if is_pairwise else algorithm.group_size)
    if algorithm.n_minibatches > n_units:
        units = "pairs" if is_pairwise else "responses"
        raise ValueError(
            f"algorithm.n_minibatches={algorithm.n_minibatches} cannot be cut from {n_units} {units}"
            f"{f' of each of {n_shards} shards' if n_shards > 1 else ''}; lower it, or raise "
            "rollout.n_prompts"
        )


class MinibatchSplitter:
    """Splits an experience into optimizer steps, and these into micro-batches.

    Every rank computes advantages and denominators over the rows of all ranks.

    Each micro-batch is processed once for each part of `module.learner_parts`; in the first
    `algorithm.critic_warmup` iterations the roles of `module.warmup_part` learn alone. Each shard is shuffled
    separately.

    Args:
        tokens_per_pass: most tokens of a micro-batch, padding included.
    """

    def __init__(
        self,
        run: RolloutRun,
        module: RolloutModule,
        advantage: AdvantageEstimator,
        tokens_per_pass: int = TOKENS_PER_PASS,
    ) -> None:
        self.advantage = advantage
        self.algorithm = run.cfg.algorithm
        self.learner_parts = module.learner_parts
        self.warmup_part = module.warmup_part
        self.max_new_tokens = run.cfg.rollout.max_new_tokens
        self.seed = run.cfg.seed
        self.n_shards = run.cfg.rollout.n_shards or run.ranks.size
        self.tokens_per_pass = tokens_per_pass

    def minibatches(self, experience: Experience) -> Iterator[TrainBatch]:
        """Yield the micro-batches of all optimizer steps of an iteration, equally many on each rank."""
        whole, advantages, is_response = self._with_advantages(experience)
        counts = experience.all_gather().n_decisions
        algorithm = self.algorithm
        is_warmup = experience.iteration < algorithm.critic_warmup
        learner_parts = (self.warmup_part,) if is_warmup else self.learner_parts
        by_shard = advantages.units.view(self.n_shards, -1, advantages.units.shape[1])
        own = experience.ranks.local_rows(self.n_shards // experience.ranks.size)
        n_parts = algorithm.n_minibatches
        for epoch in range(algorithm.n_epochs):
            generator = stream(self.seed, "shuffle", experience.iteration, epoch)
            order = torch.randperm(by_shard.shape[1], generator=generator).to(by_shard.device)
            for number, chosen in enumerate(order.tensor_split(n_parts)):
                units = by_shard[:, chosen]
                step = self._step(whole, units.flatten(0, 1), advantages.is_counted, is_response, counts)
                step = replace(
                    step,
                    is_first_update=epoch == 0 and number == 0,
                    n_steps=algorithm.n_epochs * n_parts,
                    n_steps_done=epoch * n_parts + number,
                )
                step, units = _own(step, units[own].flatten(0, 1), experience)
                yield from self._micro_batches(step, units, learner_parts, experience.ranks)

    def parts(self, experience: Experience, n_parts: int) -> Iterator[RolloutPart]:
        """Split this rank's rollout into parts of whole groups, of nearly equal size.

        Advantages and denominators are those of the whole rollout, whitening included.

        Raises:
            ValueError: more parts than groups.
        """
        n_groups = len(experience.problems) // experience.group_size
        if not 1 <= n_parts <= n_groups:
            raise ValueError(f"{n_groups} groups cannot be cut into {n_parts} parts; give at most {n_groups}")
        whole, advantages, is_response = self._with_advantages(experience)
        counts = experience.all_gather().n_decisions
        step = self._step(whole, advantages.units, advantages.is_counted, is_response, counts)
        of_group = advantages.units.view(n_groups * experience.ranks.size, -1, advantages.units.shape[1])
        n_response_tokens = whole.rollout.response_mask[of_group].flatten(1).sum(dim=1)
        by_token = self.algorithm.aggregation == "token"
        sizes = (
            *_sizes(step.loss_weight, is_response, of_group, by_token=by_token),
            n_response_tokens.double() / step.n_response_tokens,
        )
        mine = experience.ranks.local_rows(n_groups)
        step, of_group = _own(step, of_group[mine], experience)
        pieces = [one.tensor_split(n_parts) for one in (of_group, *(size[mine] for size in sizes))]
        for groups, is_counted, share, actions in zip(*pieces, strict=True):
            batches = self._micro_batches(step, groups.flatten(0, 1), (("policy",),), experience.ranks)
            yield RolloutPart(
                batches=list(batches),
                n_groups=int(is_counted.sum()),
                share=float(share.sum()),
                n_prompts=len(groups),
                token_share=float(actions.sum()),
            )

    def _with_advantages(
        self, experience: Experience
    ) -> tuple[TrainBatch, Advantages, Bool[Tensor, " batch"]]:
        """Return the rollout of all ranks as one batch without denominators, and its advantages.

        The third result is True for responses in the denominator of a mean over responses. As in TRL,
        `mask_truncated` leaves it as it is.
        """
        experience = experience.all_gather()
        rollout = experience.rollout
        if experience.rewards.is_failed is not None:
            experience = _without(experience, experience.rewards.is_failed)
        advantages = self.advantage.compute(experience)
        is_response = advantages.is_counted.any(dim=1)
        if self.algorithm.mask_truncated:
            experience = _without(experience, ~experience.has_eos)
            advantages = self.advantage.compute(experience)
        ref_logps = experience.ref_logps
        whole = TrainBatch(
            rollout=rollout,
            advantages=advantages.advantages,
            old_logps=experience.old_logps,
            ref_logps=torch.zeros_like(experience.old_logps) if ref_logps is None else ref_logps,
            correction=experience.weights.weight,
            loss_weight=torch.zeros_like(rollout.rollout_logps),
            kl_coef=experience.kl_coef if self.algorithm.kl.place == "loss" else 0.0,
            n_response_tokens=0,
            is_first_update=True,
            ends_step=True,
            old_values=experience.values,
            returns=advantages.returns,
            is_chosen=advantages.is_chosen,
        )
        return whole, advantages, is_response

    def _step(
        self,
        whole: TrainBatch,
        units: Tensor,
        is_counted: Bool[Tensor, "batch seq"],
        is_response: Bool[Tensor, " batch"],
        counts: Int[Tensor, " batch"] | None,
    ) -> TrainBatch:
        """Return the batch with the denominators of the step on these units; `counts` are of evictions."""
        rows = units.flatten()
        loss_weight = torch.zeros_like(whole.loss_weight)
        aggregate = AGGREGATIONS[self.algorithm.aggregation]
        loss_weight[rows] = aggregate(is_counted[rows], self.max_new_tokens, is_response[rows].sum())
        is_pair = (loss_weight[units] != 0).any(dim=2).all(dim=1)  # both sides count
        return replace(
            whole,
            loss_weight=loss_weight,
            n_response_tokens=int(whole.rollout.response_mask[rows].sum()),
            n_pairs=int(is_pair.sum()) if units.shape[1] > 1 else 0,
            n_decisions=0 if counts is None else int(counts[rows].sum()),
        )

    def _micro_batches(
        self, step: TrainBatch, units: Tensor, learner_parts: tuple[tuple[str, ...], ...], ranks: Ranks
    ) -> Iterator[TrainBatch]:
        """Yield the units in micro-batches of at most `tokens_per_pass` tokens, as many on every rank."""
        attention_mask = step.rollout.attention_mask
        n_tokens = attention_mask.sum(dim=1)[units].amax(dim=1)
        cut = partial(cut_into_passes, n_tokens, self.tokens_per_pass, rows_per_unit=units.shape[1])
        parts = cut(n_passes=ranks.all_reduce_max(len(cut())))
        n_batches = len(parts) * len(learner_parts)
        for number, part in enumerate(parts):
            batch = packed(step, attention_mask, units[part].flatten())
            for place, learners in enumerate(learner_parts, start=1):
                n_done = number * len(learner_parts) + place
                yield replace(
                    batch,
                    ends_step=n_done == n_batches,
                    learners=learners,
                    n_steps_done=step.n_steps_done + n_done / n_batches,
                )


def _without(experience: Experience, is_left_out: Bool[Tensor, " batch"]) -> Experience:
    """Return the experience without these responses in the policy's loss."""
    is_counted = experience.weights.is_counted & ~is_left_out[:, None]
    return replace(experience, weights=replace(experience.weights, is_counted=is_counted))


def _own(step: TrainBatch, units: Tensor, experience: Experience) -> tuple[TrainBatch, Tensor]:
    """Return this rank's rows with their eviction tables, and units as indices into them."""
    if experience.ranks.size == 1:
        return step, units
    mine = experience.ranks.local_rows(len(experience.problems))
    return replace(step.rows(mine), rollout=experience.rollout), units - mine.start


def _sizes(
    loss_weight: Float[Tensor, "batch seq"],
    is_response: Bool[Tensor, " batch"],
    of_group: Int[Tensor, "group unit member"],
    *,
    by_token: bool,
) -> tuple[Bool[Tensor, " group"], Float[Tensor, " group"]]:
    """Return for each group True if the policy loss counts it, and its share of the denominator.

    The denominator counts tokens or responses; a pair counts only if both sides do.
    """
    weight = loss_weight[of_group]
    is_unit = (weight != 0).any(dim=3).all(dim=2)
    if of_group.shape[2] > 1:
        counted = is_unit
    else:
        counted = (weight != 0 if by_token else is_response[of_group]).flatten(1)
    count = counted.sum(dim=1)
    return is_unit.any(dim=1), count.double() / count.sum().clamp(min=1)
