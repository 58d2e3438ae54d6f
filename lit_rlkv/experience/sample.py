"""Sample responses to encoded prompts, and join rollouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.tokenizers import decode_completions, end_token_ids, padded
from lit_rlkv.environments.conversations import EnvironmentPool, TextConversations
from lit_rlkv.experience.protocols import RolloutRun
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.planning.advice import explain_rollout
from lit_rlkv.rewards.manager import PendingRewards
from lit_rlkv.rng import stream
from lit_rlkv.rollout import generate
from lit_rlkv.rollout.turns import Conversations
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Problem, PromptBatch, Rollout

GREEDY = Sampling(temperature=0.0)


def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    settings: RolloutConfig,
    *,
    cache: CacheSpec,
    generator: torch.Generator,
    num_return_sequences: int = 1,
    on_progress: Callable[[int], object] | None = None,
    conversations: Conversations | None = None,
    sampling: Sampling,
) -> Rollout:
    """Call `generate` on the model's device with the settings of a config.

    Args:
        sampling: how tokens are drawn, in place of what `settings` says, which may be given again.
    """
    prompts = prompts.to(model.device)
    return generate(
        model,
        prompts.input_ids,
        prompts.attention_mask,
        cache=cache,
        generator=generator,
        num_return_sequences=num_return_sequences,
        on_progress=on_progress,
        conversations=conversations,
        **generate_options(tokenizer, settings) | sampling.options,
    )


def encode_problems(
    tokenizer: PreTrainedTokenizerBase,
    environments: EnvironmentPool | None,
    problems: Sequence[Problem],
    group_size: int,
) -> tuple[PromptBatch, TextConversations | None]:
    """Return the encoded prompts, and the conversations of `group_size` responses to each, if any."""
    if environments is None:
        return encode_prompts(tokenizer, [problem.prompt for problem in problems]), None
    talk = environments.begin([problem for problem in problems for _ in range(group_size)])
    return encode_prompts(tokenizer, talk.prompts(group_size), environments.tools), talk


def generate_options(tokenizer: PreTrainedTokenizerBase, settings: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of `generate` that depend on the tokenizer and the config."""
    return {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": end_token_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        **settings.options,
        "max_rows": settings.max_rows,
        "cuda_graph": settings.cuda_graph,
        "n_splits": settings.n_splits,
        "compile_layers": settings.compile_layers,
        "record_routing": settings.replay_routing,
        "prefill_chunk": settings.prefill_chunk,
    }


def joined(rollouts: Sequence[Rollout], n_columns: int, pad_token_id: int) -> Rollout:
    """Concatenate rollouts, padded to equal columns; `kv_bytes` is the maximum."""
    wide = [widened(rollout, n_columns, pad_token_id) for rollout in rollouts]
    return replace(Rollout.cat(wide), kv_bytes=max(rollout.kv_bytes for rollout in wide))


def widened(rollout: Rollout, n_columns: int, pad_token_id: int, n_left: int = 0) -> Rollout:
    """Pad a rollout to `n_columns`: with `n_left` of them on the left, the others on the right."""
    n_right = n_columns - rollout.input_ids.shape[1] - n_left
    if n_left == n_right == 0:
        return rollout
    input_ids = F.pad(rollout.input_ids, (n_left, n_right), value=pad_token_id)
    return replace(rollout.padded(n_right, n_left), input_ids=input_ids)


def sample_groups(
    run: RolloutRun,
    backbone: PreTrainedModel,
    cache: CacheSpec,
    shards: Mapping[int, Sequence[Problem]],
    pending: PendingRewards,
    draw: tuple[str | int, ...],
    on_progress: Callable[[int], object],
    *,
    is_greedy: bool = False,
) -> tuple[Rollout, list[TextConversations]]:
    """Sample a group of responses to each problem: groups side by side, shard after shard.

    Each response is added to `pending` once it has ended. The second result is the conversations of each
    shard, none without environments.

    Args:
        shards: this rank's problems by the number of their shard.
        draw: names of the random numbers, beside the run's seed and the shard.
        is_greedy: one response of likeliest tokens to each problem, in place of a group.
    """
    settings, group_size = run.cfg.rollout, 1 if is_greedy else run.cfg.algorithm.group_size
    options = generate_options(run.tokenizer, settings) | (GREEDY.options if is_greedy else {})
    begun = {
        number: encode_problems(run.tokenizer, run.environments, problems, group_size)
        for number, problems in shards.items()
    }
    # All ranks use the same columns, on which the random numbers of an eviction depend.
    width = run.ranks.all_reduce_max(max(prompts.input_ids.shape[1] for prompts, _ in begun.values()))
    pad = run.tokenizer.pad_token_id
    rollouts: list[Rollout] = []
    for number, (part, talk) in begun.items():
        prompts = padded(part, width, pad).to(backbone.device)
        shape = (len(prompts.input_ids), width)
        n_earlier = sum(len(rollout.input_ids) for rollout in rollouts)
        with explain_out_of_memory(partial(explain_rollout, backbone, cache, shape, settings, group_size)):
            rollout = generate(
                backbone,
                prompts.input_ids,
                prompts.attention_mask,
                cache=cache,
                generator=stream(run.cfg.seed, "sample", *draw, number, device=backbone.device),
                num_return_sequences=group_size,
                on_progress=on_progress,
                on_finished=partial(_add, run.tokenizer, pending, n_earlier),
                conversations=talk,
                **options,
            )
        rollouts.append(rollout)
    n_columns = run.ranks.all_reduce_max(max(rollout.input_ids.shape[1] for rollout in rollouts))
    return joined(rollouts, n_columns, pad), [talk for _, talk in begun.values() if talk is not None]


def _add(
    tokenizer: PreTrainedTokenizerBase,
    pending: PendingRewards,
    first_row: int,
    rows: list[int],
    input_ids: Int[Tensor, "row seq"],
    response_mask: Bool[Tensor, "row seq"],
) -> None:
    """Add responses that have ended to the batch; `first_row` is that of their shard."""
    completions = decode_completions(tokenizer, input_ids, response_mask)
    pending.add([first_row + row for row in rows], completions)
