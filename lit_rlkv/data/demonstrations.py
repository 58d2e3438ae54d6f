"""Demonstrations: worked solutions to imitate, and preference pairs, as batches for the SFT stage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.chat import Observe, encode_prompts, encode_response
from lit_rlkv.data.chat_template import Tool
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.models.attention import Probe
from lit_rlkv.models.backbone import check_length, hidden_states, token_positions
from lit_rlkv.models.packing import TOKENS_PER_PASS, cut_into_passes, packed
from lit_rlkv.rng import derive_seed
from lit_rlkv.tasks import Task
from lit_rlkv.types import PreferencePair, Problem, Prompt, Record, TensorBatch


@dataclass(frozen=True)
class DemonstrationBatch(TensorBatch):
    """Prompts with completions to imitate or to judge; every completion starts at the same column."""

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    """True on prompt and completion tokens, False on padding."""
    is_target: Bool[Tensor, "batch seq"]
    """True on completion tokens, including the end-of-sequence tokens, not on observations between turns."""
    n_tokens: int
    """Tokens of the longest row without its padding: positions are each row's own. An int, because asking a
    tensor for it would make the host wait for the device."""


@dataclass(frozen=True)
class SFTBatch(TensorBatch):
    """Demonstrations, and for the first of them a rejected completion of the same prompt."""

    chosen: DemonstrationBatch
    rejected: DemonstrationBatch | None
    """Row i pairs with row i of `chosen`; there may be fewer rows. None without pairs."""
    n_targets: int
    """Target tokens of the whole optimizer step, all ranks."""
    n_pairs: int = 0
    """Pairs of the whole optimizer step, all ranks."""
    ends_step: bool = True
    """True for the last micro-batch of an optimizer step."""
    learners: tuple[str, ...] = ()
    """Empty, because the backbone and its heads learn as one and there are no roles yet."""
    n_steps: int = 1
    """Optimizer steps of the iteration."""
    n_steps_done: float | int = 1
    """Optimizer steps of the iteration done after this micro-batch; a part of a step is a fraction."""


def own_prompts(problems: Sequence[Problem]) -> list[Prompt]:
    """Return the prompts as the task has them."""
    return [problem.prompt for problem in problems]


class PreferenceDataModule(L.LightningDataModule):
    """Endless demonstrations and pairs, `steps_per_loader` batches a loader, each continuing the last.

    Args:
        batch_size: rows of a step, shared by the ranks.
        n_pairs: rows of a step, from the first, that also have a rejected completion; 0 for none.
        tokens_per_pass: most tokens of a micro-batch, padding included.
        ranks: those among which `source` divides the problems.
        tools: functions that the chat template describes, as in the rollouts.
        prompts_of: returns the prompts of problems, as in the rollouts.
        observe: returns the observations of worked turns, as in the rollouts.
    """

    def __init__(
        self,
        task: Task,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        n_pairs: int,
        steps_per_loader: int,
        seed: int,
        ranks: Ranks = SINGLE_PROCESS,
        tokens_per_pass: int = TOKENS_PER_PASS,
        tools: Sequence[Tool] = (),
        prompts_of: Callable[[Sequence[Problem]], Sequence[Prompt]] = own_prompts,
        observe: Observe = None,
    ) -> None:
        super().__init__()
        self.task = task
        self.source = source
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.batch_size = batch_size // ranks.size
        self.n_pairs = n_pairs
        self.steps_per_loader = steps_per_loader
        self.seed = seed
        self.tokens_per_pass = tokens_per_pass
        self.tools = tools
        self.prompts_of = prompts_of
        self.observe = observe
        self.n_batches = 0

    def train_dataloader(self) -> DataLoader[SFTBatch]:
        return DataLoader(_Batches(self), batch_size=None)

    def next_batch(self) -> SFTBatch:
        """Return the next optimizer step; the batch's number names the stream that corrupts its problems."""
        rejected = self._rejected() if self.n_pairs else None
        self.n_batches += 1
        n = self.batch_size * self.ranks.size
        problems = self.source.take_places(n, range(self.ranks.rank, n, self.ranks.size))
        chosen = self._encoded(problems, [problem.solution for problem in problems])
        n_targets = sum(self.ranks.all_gather_object([int(chosen.is_target.sum())]))
        return SFTBatch(chosen, rejected, n_targets, self.n_pairs)

    def micro_batches(self, step: SFTBatch) -> Iterator[SFTBatch]:
        """Yield an optimizer step in micro-batches, as many on every rank; first the rows with pairs."""
        sides = [step.chosen, *([] if step.rejected is None else [step.rejected])]
        n_tokens = sum(side.input_ids.numel() for side in sides)
        if self.ranks.all_reduce_max(n_tokens) <= self.tokens_per_pass:
            yield step
            return
        lengths = step.chosen.attention_mask.sum(dim=1)
        n_paired = 0 if step.rejected is None else len(step.rejected.input_ids)
        paired = lengths[:n_paired]
        if step.rejected is not None:
            paired = torch.maximum(paired, step.rejected.attention_mask.sum(dim=1))
        parts = self._cut(paired, rows_per_unit=2)
        parts += [part + n_paired for part in self._cut(lengths[n_paired:], rows_per_unit=1)]
        for number, rows in enumerate(parts):
            has_pairs = step.rejected is not None and int(rows[0]) < n_paired
            yield replace(
                step,
                chosen=_packed(step.chosen, rows),
                rejected=_packed(step.rejected, rows) if step.rejected is not None and has_pairs else None,
                ends_step=number == len(parts) - 1,
                n_steps_done=step.n_steps_done - 1 + (number + 1) / len(parts),
            )

    def _cut(self, n_tokens: Int[Tensor, " unit"], rows_per_unit: int) -> list[Tensor]:
        cut = partial(cut_into_passes, n_tokens, self.tokens_per_pass, rows_per_unit=rows_per_unit)
        return cut(n_passes=self.ranks.all_reduce_max(len(cut()))) if len(n_tokens) else []

    def _rejected(self) -> DemonstrationBatch:
        """Return this rank's rejected sides; one stream corrupts the pairs of all ranks, however many."""
        rng = Random(derive_seed(self.seed, "corrupt", self.n_batches, SINGLE_PROCESS.rank))
        problems = self.source.peek(self.n_pairs)
        rejected = [preference_pair(self.task, problem, rng).rejected for problem in problems]
        own = slice(self.ranks.rank, None, self.ranks.size)
        return self._encoded(problems[own], rejected[own])

    def _encoded(self, problems: Sequence[Problem], completions: Sequence[str]) -> DemonstrationBatch:
        prompts, turns = self.prompts_of(problems), [problem.turns for problem in problems]
        return encode_completions(self.tokenizer, prompts, completions, turns, self.tools, self.observe)

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches, "source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_batches = state_dict["n_batches"]
        self.source.load_state_dict(state_dict["source"])


class _Batches(IterableDataset[SFTBatch]):
    def __init__(self, module: PreferenceDataModule) -> None:
        self.module = module

    def __iter__(self) -> Iterator[SFTBatch]:
        n_steps = self.module.steps_per_loader
        for number in range(n_steps):
            step = replace(self.module.next_batch(), n_steps=n_steps, n_steps_done=number + 1)
            yield from self.module.micro_batches(step)


def _packed(batch: DemonstrationBatch, rows: Tensor) -> DemonstrationBatch:
    part = packed(batch, batch.attention_mask, rows)
    return replace(part, n_tokens=part.input_ids.shape[1])


def preference_pair(task: Task, problem: Problem, rng: Random) -> PreferencePair:
    """Return the worked solution paired with a corrupted one.

    Raises:
        ValueError: the task's verifier does not tell the sides apart, or without a verifier they are equal.
    """
    pair = PreferencePair(problem.prompt, problem.solution, task.corrupt(problem, rng))
    if not task.is_verifiable:
        if pair.chosen == pair.rejected:
            raise ValueError(f"the sides of {pair} must differ; fix corrupt of {type(task).__name__}")
        return pair
    scores = task.score(problem, pair.chosen), task.score(problem, pair.rejected)
    if scores != (1.0, 0.0):
        raise ValueError(
            f"{type(task).__name__} must score the two sides of {pair} as (1.0, 0.0), got {scores}; fix its "
            "score or corrupt"
        )
    return pair


def encode_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    turns: Sequence[Sequence[str]] | None = None,
    tools: Sequence[Tool] = (),
    observe: Observe = None,
) -> DemonstrationBatch:
    """Return prompts, padded on the left, with completion and end of turn, padded on the right.

    Args:
        turns: of each row, what comes before the completion: a response and its observation, and so on.
        tools: functions that the chat template describes.
        observe: returns the observation after a worked turn.
    """
    left = encode_prompts(tokenizer, prompts, tools)
    rows = zip(turns or [()] * len(prompts), completions, strict=True)
    encoded = [encode_response(tokenizer, completion, before, observe) for before, completion in rows]
    endings, targets = zip(*encoded, strict=True)
    width = max(len(ending) for ending in endings)
    pad = tokenizer.pad_token_id
    right_ids = torch.tensor([ending + [pad] * (width - len(ending)) for ending in endings])
    right_targets = torch.tensor([target + [False] * (width - len(target)) for target in targets])
    n_tokens = torch.tensor([len(ending) for ending in endings])
    attention_mask = torch.cat([left.attention_mask, torch.arange(width) < n_tokens[:, None]], dim=1)
    return DemonstrationBatch(
        input_ids=torch.cat([left.input_ids, right_ids], dim=1),
        attention_mask=attention_mask,
        is_target=torch.cat([torch.zeros_like(left.attention_mask), right_targets], dim=1),
        n_tokens=int(attention_mask.sum(dim=1).max()),
    )


def dense_hidden(
    backbone: PreTrainedModel, batch: DemonstrationBatch, probe: Probe | None = None
) -> Float[Tensor, "batch seq dim"]:
    """Return the last hidden states under dense causal attention; gradients flow."""
    check_length(backbone, batch.n_tokens)
    positions = token_positions(batch.attention_mask)
    record = Record.dense(batch.attention_mask)
    return hidden_states(backbone, batch.input_ids, positions, record=record, probe=probe)
