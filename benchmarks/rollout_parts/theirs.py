"""transformers.generate with its dense cache: steps timed at a few lengths, and integrated over all."""

import gc
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rollout_parts.setting import PAD, Setting
from transformers import DynamicCache, PreTrainedModel

from lit_rlkv.out_of_memory import is_out_of_memory

N_LENGTHS = 4
MAX_STEPS = 40
"""Steps of the longer of two calls, whose difference gives the time of a step without what a call costs."""


@dataclass(frozen=True)
class Steps:
    """Time of a decode step at some lengths of the cache, and a straight line through them."""

    lengths: list[float]
    step_s: list[float]

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a token in the cache, and of a step with an empty one, by least squares."""
        slope, intercept = np.polyfit(self.lengths, self.step_s, 1)
        return float(slope), float(intercept)

    @property
    def fit_error(self) -> float:
        """Largest distance of a measured step from the line, over the step."""
        slope, intercept = self.line
        pairs = zip(self.lengths, self.step_s, strict=True)
        return max(abs(intercept + slope * length - step) / step for length, step in pairs)

    def integrate(self, first: int, n_steps: int) -> float:
        """Return the seconds of `n_steps` steps, the first with `first` tokens in the cache."""
        slope, intercept = self.line
        return n_steps * (intercept + slope * (first + (n_steps - 1) / 2))


@torch.no_grad()
def time_theirs(setting: Setting) -> dict[str, Any]:
    """Return seconds of a whole call at the largest batch that fits, halving from ours.

    The longest length is measured first, so that a batch that does not fit is found at once.

    Raises:
        RuntimeError: not even one row fits.
    """
    model, batch = setting.plain_model(), setting.batch
    while batch >= 1:
        found = measured(setting, model, batch)
        if found is not None:
            return found
        gc.collect()
        torch.cuda.empty_cache()
        batch //= 2
    raise RuntimeError("not even one row fits transformers.generate; give a smaller --new")


def measured(setting: Setting, model: PreTrainedModel, batch: int) -> dict[str, Any] | None:
    """Return the row of a batch; None if it does not fit."""
    prompt = setting.shape.prompt
    n_long = max(2, min(MAX_STEPS, setting.new // 4))
    n_short = max(1, n_long // 5)
    longest = prompt + setting.new - n_long
    parts = [part / (N_LENGTHS - 1) for part in reversed(range(N_LENGTHS))]
    starts = [round(prompt + (longest - prompt) * part) for part in parts]
    try:
        step_s = [seconds_of_step(setting, model, batch, start, n_short, n_long) for start in starts]
        prefill_s = seconds_of_prefill(setting, model, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    # The steps in the difference of the two calls see start + n_short .. start + n_long - 1 cached tokens.
    steps = Steps([start + (n_short + n_long - 1) / 2 for start in starts], step_s)
    median_s = prefill_s + steps.integrate(prompt, setting.new - 1)
    return {
        "cache": "transformers dense",
        "batch": batch,
        "asked_batch": setting.batch,
        "new": setting.new,
        "integrated": True,
        "lengths": steps.lengths,
        "step_ms": [1e3 * seconds for seconds in step_s],
        "fit_error": steps.fit_error,
        "prefill_s": prefill_s,
        "median_s": median_s,
        "tokens_per_s": batch * setting.new / median_s,
    }


def seconds_of_step(
    setting: Setting, model: PreTrainedModel, batch: int, n_cached: int, n_short: int, n_long: int
) -> float:
    """Return the time of a step of generate() that starts with a full cache, from a long and a short call."""
    cache = filled_cache(setting, model, batch, n_cached)
    input_ids = setting.tokens(batch, n_cached + 1)
    taken: dict[int, list[float]] = {n_short: [], n_long: []}
    generate(model, input_ids, n_short, cache)  # warms up
    for _ in range(setting.rounds):
        for n_new, times in taken.items():
            cache.crop(n_cached - cache.get_seq_length())  # below 0: so many tokens are dropped
            times.append(setting.seconds(lambda n=n_new: generate(model, input_ids, n, cache)))
    short, long = (statistics.median(times) for times in taken.values())
    return (long - short) / (n_long - n_short)


def seconds_of_prefill(setting: Setting, model: PreTrainedModel, batch: int) -> float:
    """Return the time of a call that generates one token."""
    input_ids = setting.tokens(batch, setting.shape.prompt)
    times = [setting.seconds(lambda: generate(model, input_ids, 1, None)) for _ in range(1 + setting.rounds)]
    return statistics.median(times[1:])


def filled_cache(setting: Setting, model: PreTrainedModel, batch: int, n_cached: int) -> DynamicCache:
    """Return a cache that holds random keys and values of `n_cached` tokens in every row and layer."""
    shape = setting.shape.shape
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    size = (batch, shape["num_key_value_heads"], n_cached, head_dim)
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*(torch.randn(size, device=model.device, dtype=model.dtype) for _ in range(2)), layer)
    return cache


def generate(
    model: PreTrainedModel, input_ids: torch.Tensor, n_new: int, cache: DynamicCache | None
) -> torch.Tensor:
    """Return what transformers samples; it feeds the tokens that the cache does not hold."""
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        max_new_tokens=n_new,
        do_sample=True,
        top_k=0,
        pad_token_id=PAD,
        eos_token_id=None,
    )
