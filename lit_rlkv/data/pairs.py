"""Worked solutions and preference pairs as batches of tokens, in the column layout of a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.tasks.base import Task
from lit_rlkv.data.tokenizers import encode, encode_prompts
from lit_rlkv.types import PreferencePair, Problem, TensorBatch


@dataclass(frozen=True)
class DemonstrationBatch(TensorBatch):
    """Prompts with completions to imitate; every completion starts at the same column."""

    token_ids: Int[Tensor, "batch seq"]
    is_token: Bool[Tensor, "batch seq"]
    """True on prompt and completion tokens, False on padding."""
    is_target: Bool[Tensor, "batch seq"]
    """True on completion tokens, including the end-of-sequence token."""


@dataclass(frozen=True)
class PairBatch(TensorBatch):
    """Prompts with a right and a wrong completion; all completions start at the same column."""

    chosen_ids: Int[Tensor, "pair seq"]
    chosen_is_token: Bool[Tensor, "pair seq"]
    chosen_is_target: Bool[Tensor, "pair seq"]
    rejected_ids: Int[Tensor, "pair seq"]
    rejected_is_token: Bool[Tensor, "pair seq"]
    rejected_is_target: Bool[Tensor, "pair seq"]


def preference_pair(task: Task, problem: Problem, rng: Random) -> PreferencePair:
    """The worked solution against a corrupted one; raises if the task's verifier does not tell them apart."""
    pair = PreferencePair(problem.prompt, problem.solution, task.corrupt(problem, rng))
    scores = task.score(problem, pair.chosen), task.score(problem, pair.rejected)
    if scores != (1.0, 0.0):
        raise ValueError(
            f"{type(task).__name__} scores the two sides of {pair} as {scores}, but a pair needs (1.0, 0.0); "
            "mend its score or corrupt"
        )
    return pair


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> DemonstrationBatch:
    """Prompts and their worked solutions, for supervised fine-tuning."""
    return _encode(tokenizer, [p.prompt for p in problems], [p.solution for p in problems])


def encode_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[PreferencePair]) -> PairBatch:
    """Both sides of each pair, padded to one common shape."""
    prompts = [pair.prompt for pair in pairs]
    both = _encode(
        tokenizer, prompts + prompts, [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    )
    chosen, rejected = both.rows(slice(len(pairs))), both.rows(slice(len(pairs), None))
    return PairBatch(
        chosen_ids=chosen.token_ids,
        chosen_is_token=chosen.is_token,
        chosen_is_target=chosen.is_target,
        rejected_ids=rejected.token_ids,
        rejected_is_token=rejected.is_token,
        rejected_is_target=rejected.is_target,
    )


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> DemonstrationBatch:
    left = encode_prompts(tokenizer, prompts)
    endings = [[*encode(tokenizer, completion), tokenizer.eos_token_id] for completion in completions]
    width = max(len(ending) for ending in endings)
    right_ids = torch.tensor(
        [ending + [tokenizer.pad_token_id] * (width - len(ending)) for ending in endings]
    )
    n_targets = torch.tensor([len(ending) for ending in endings])
    is_ending = torch.arange(width) < n_targets[:, None]
    return DemonstrationBatch(
        token_ids=torch.cat([left.token_ids, right_ids], dim=1),
        is_token=torch.cat([left.attention_mask, is_ending], dim=1),
        is_target=torch.cat([torch.zeros_like(left.attention_mask), is_ending], dim=1),
    )
