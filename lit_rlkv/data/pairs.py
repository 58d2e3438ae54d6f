"""Worked solutions and preference pairs as batches of tokens, in the column layout of a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.tokenizers import encode, encode_prompts
from lit_rlkv.models.backbone import check_length, hidden_states, token_positions
from lit_rlkv.models.replay import dense_evicted_at
from lit_rlkv.tasks.base import Task
from lit_rlkv.types import PreferencePair, Problem, Prompt, TensorBatch


@dataclass(frozen=True)
class DemonstrationBatch(TensorBatch):
    """Prompts with completions to imitate or to judge; every completion starts at the same column."""

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    """True on prompt and completion tokens, False on padding."""
    is_target: Bool[Tensor, "batch seq"]
    """True on completion tokens, including the end-of-sequence token."""
    n_tokens: int
    """Of the longest row, without its padding: positions are each row's own. A number, since asking a tensor
    for it would make the host wait for the device."""


def preference_pair(task: Task, problem: Problem, rng: Random) -> PreferencePair:
    """The worked solution against a corrupted one.

    Raises:
        ValueError: the task's verifier, or where it has none a comparison, does not tell them apart.
    """
    pair = PreferencePair(problem.prompt, problem.solution, task.corrupt(problem, rng))
    if not task.is_verifiable:
        if pair.chosen == pair.rejected:
            raise ValueError(
                f"{type(task).__name__} gives {pair} two equal sides, but one of a pair must be better; "
                "mend its corrupt"
            )
        return pair
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
    return encode_completions(tokenizer, [p.prompt for p in problems], [p.solution for p in problems])


def encode_completions(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], completions: Sequence[str]
) -> DemonstrationBatch:
    """Each prompt, padded on the left, with its completion and an end of sequence, padded on the right."""
    left = encode_prompts(tokenizer, prompts)
    endings = [[*encode(tokenizer, completion), tokenizer.eos_token_id] for completion in completions]
    width = max(len(ending) for ending in endings)
    right_ids = torch.tensor(
        [ending + [tokenizer.pad_token_id] * (width - len(ending)) for ending in endings]
    )
    n_targets = torch.tensor([len(ending) for ending in endings])
    is_ending = torch.arange(width) < n_targets[:, None]
    attention_mask = torch.cat([left.attention_mask, is_ending], dim=1)
    return DemonstrationBatch(
        input_ids=torch.cat([left.input_ids, right_ids], dim=1),
        attention_mask=attention_mask,
        is_target=torch.cat([torch.zeros_like(left.attention_mask), is_ending], dim=1),
        n_tokens=int(attention_mask.sum(dim=1).max()),
    )


def dense_hidden(backbone: PreTrainedModel, batch: DemonstrationBatch) -> Float[Tensor, "batch seq dim"]:
    """Last hidden states where every token sees all before it; gradients flow.

    Raises:
        ValueError: more tokens than the backbone attends to exactly.
    """
    check_length(backbone, batch.n_tokens)
    positions = token_positions(batch.attention_mask)
    return hidden_states(
        backbone, batch.input_ids, positions, evicted_at=dense_evicted_at(batch.attention_mask)
    )
