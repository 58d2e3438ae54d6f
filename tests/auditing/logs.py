"""Logs of a sampler with and without faults, as the rows of JSON lines."""

import torch

from lit_rlkv import CacheSpec, generate, prepare_backbone
from lit_rlkv.types import NEVER
from tests.models_zoo import build, tiny_config

N_PROMPT, N_NEW, BOS = 10, 40, 2
SPEC = CacheSpec("snapkv", budget=12, interval=4, sink=2, window=2)


def model(**changes):
    torch.manual_seed(0)
    return prepare_backbone(build(tiny_config("llama", **changes)).eval())


def sampled(backbone, cache=None, temperature=1.0, n_rows=4, first=None, last=None, **options):
    torch.manual_seed(1)
    prompts = torch.randint(3, 60, (n_rows, N_PROMPT))
    if first is not None:
        prompts[:, 0] = first
    if last is not None:
        prompts[:, -1] = last
    return generate(
        backbone,
        prompts,
        torch.ones_like(prompts),
        max_new_tokens=N_NEW,
        cache=CacheSpec.dense() if cache is None else cache,
        temperature=temperature,
        generator=torch.Generator().manual_seed(2),
        eos_token_id=63,
        pad_token_id=0,
        **options,
    )


def rows_of(rollout, *, has_record=False):
    """The rows of a rollout by our own names."""
    found = []
    for row in range(len(rollout.input_ids)):
        end = int(rollout.attention_mask[row].nonzero().max()) + 1
        tokens = rollout.input_ids[row, :end].tolist()
        one = {
            "prompt_ids": tokens[:N_PROMPT],
            "response_ids": tokens[N_PROMPT:],
            "logps": rollout.rollout_logps[row, N_PROMPT:end].tolist(),
        }
        if has_record:
            times = rollout.evicted_at[row, :, :, :end].long()
            one["evicted_at"] = times.masked_fill(times > end, NEVER).tolist()
        found.append(one)
    return found
