"""Rollouts of tiny models on ragged prompts, and how far a learner's log-probs are from the sampler's."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policy import Policy
from lit_rlkv.models import replay_logps
from lit_rlkv.rollout import generate
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.rollout.generate import as_rollout
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import PAD, VOCAB, ragged_prompts, tiny_model

SIZES = {"budget": 8, "interval": 3, "sink": 1, "window": 3}
LENS = (14, 9, 4, 1)
"""Prompts of 14 and 9 tokens exceed the budget, those of 4 and 1 do not."""
LONG = (31, 22, 9, 1)
"""Prompts of several chunks."""
TOLERANCE = 1e-4
"""Largest gap between the log-probs of two computations in float32, in nats."""
NOTICED = 100 * TOLERANCE
"""Smallest gap of another function."""
N_GIVEN = 64


def spec_of(policy: str | Policy, **changes: Any) -> CacheSpec:
    """Return a small cache of that policy, which evicts from prompts too, or of all keys if it is dense."""
    return CacheSpec(policy, **SIZES | changes)


def roll_out(
    model: PreTrainedModel | str = "llama",
    cache: CacheSpec | str = "snapkv",
    lens: tuple[int, ...] = LENS,
    **options: Any,
) -> Rollout:
    """Sample by a model, or the tiny one of a family, under a cache, or the small one of a policy."""
    model = tiny_model(model) if isinstance(model, str) else model
    settings: dict[str, Any] = {
        "cache": spec_of(cache) if isinstance(cache, str) else cache,
        "max_new_tokens": 18,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "generator": torch.Generator(model.device).manual_seed(0),
    }
    prompts = (tokens.to(model.device) for tokens in ragged_prompts(lens))
    return generate(model, *prompts, **settings | options)


def converse(
    model: PreTrainedModel | str,
    cache: CacheSpec | str,
    chunk: int | None,
    top_k: int | None = None,
    top_p: float = 1.0,
    **options: Any,
) -> Rollout:
    """Four tokens of a response, then given ones of another length in each row, and so on."""
    model = tiny_model(model) if isinstance(model, str) else model
    cache = spec_of(cache) if isinstance(cache, str) else cache
    input_ids, is_prompt = ragged_prompts(LONG)
    n_rows, generator = len(LONG), torch.Generator().manual_seed(0)
    settings = DecodeSettings(
        N_GIVEN, torch.tensor([], dtype=torch.long), PAD, Sampling(top_k=top_k, top_p=top_p)
    )
    options = {"cuda_graph": None, "prefill_chunk": chunk} | options
    decoder = Decoder(model, cache, n_rows, max(LONG), settings, generator, **options)
    with torch.no_grad():
        decoder.prefill(range(n_rows), input_ids, is_prompt)
        for turn in range(3):
            for _ in range(4):
                decoder.step()
            rows = [row for row in range(n_rows) if (row + turn) % 3 != 0]
            n_given = 1 + torch.tensor([5 * row + 7 * turn for row in rows]) % 11
            is_token = torch.arange(11) >= 11 - n_given[:, None]
            tokens = torch.randint(1, VOCAB, is_token.shape, generator=generator)
            decoder.feed(rows, tokens.masked_fill(~is_token, PAD), is_token)
        for _ in range(4):
            decoder.step()
    return as_rollout(decoder, decoder.read_rows(range(n_rows)), is_prompt)


@torch.no_grad()
def gaps(model: PreTrainedModel | str, rollout: Rollout, **options: Any) -> Tensor:
    """Return by response token |log π − log μ| of a learner that replays the rollout, in nats."""
    model = tiny_model(model) if isinstance(model, str) else model
    return (replay_logps(model, rollout, **options) - rollout.rollout_logps)[rollout.response_mask].abs()


def gap(model: PreTrainedModel | str, rollout: Rollout, **options: Any) -> float:
    """Return the largest of `gaps`."""
    return float(gaps(model, rollout, **options).max())


def same(a: Rollout, b: Rollout) -> bool:
    """True if tokens, log-probs and evictions are equal in every bit."""
    names = ("input_ids", "attention_mask", "response_mask", "rollout_logps", "evicted_at")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def died(rollout: Rollout) -> Tensor:
    """True for the keys that were evicted, [row, layer, kv_head, column]."""
    return (rollout.evicted_at > 0) & (rollout.evicted_at < NEVER)


def moved(rollout: Rollout, by: int = 1) -> Rollout:
    """Return the rollout with every eviction so many columns later."""
    return rollout.with_record(evicted_at=rollout.evicted_at + by * died(rollout).int())
