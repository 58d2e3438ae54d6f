"""Score a policy on held-out prompts, with each cache that a user may want to run it with."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.tasks import Task
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.masking import masked_mean
from lit_rlkv.models import replay_logps
from lit_rlkv.rewards import score
from lit_rlkv.rng import stream
from lit_rlkv.rollout import generate
from lit_rlkv.types import EvalRow, Problem, Rollout


@torch.no_grad()
def evaluate_cache(
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    cache: CacheSpec,
    *,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
) -> tuple[EvalRow, Rollout]:
    """Accuracy of the role that is active now, and the rollout of the last batch.

    Log-probs need a distribution, so at temperature 0 the mismatch columns are 0.
    """
    n_right = 0.0
    n_tokens = 0
    kl_sum, gap, kv_bytes = 0.0, 0.0, 0
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        prompts = encode_prompts(tokenizer, [p.prompt for p in batch]).to(backbone.device)
        rollout = generate(
            backbone,
            prompts.token_ids,
            prompts.attention_mask,
            cache=cache,
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            temperature=temperature,
            generator=stream(seed, "evaluate", cache.label, start, device=backbone.device),
        )
        completions = decode_completions(tokenizer, rollout.token_ids, rollout.is_action)
        n_right += float(score(task.score, batch, completions).total.sum())
        n_tokens += int(rollout.is_action.sum())
        kv_bytes = max(kv_bytes, rollout.kv_bytes)
        if temperature > 0:
            shadow = replay_logps(backbone, rollout, temperature=temperature)
            dense = (
                shadow
                if cache.is_dense
                else replay_logps(backbone, rollout, shadow=False, temperature=temperature)
            )
            gap = max(gap, float((shadow - rollout.sampler_logps).abs().max()))
            log_ratio = rollout.sampler_logps - dense
            kl_sum += float(masked_mean(log_ratio, rollout.is_action) * rollout.is_action.sum())
    row = EvalRow(
        cache=cache.label,
        budget=None if cache.is_dense else cache.budget,
        accuracy=n_right / len(problems),
        n_problems=len(problems),
        mean_length=n_tokens / len(problems),
        kv_bytes=kv_bytes,
        kl=kl_sum / n_tokens,
        replay_gap=gap,
    )
    return row, rollout
