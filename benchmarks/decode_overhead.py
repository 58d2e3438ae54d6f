"""Measure what the decode loop adds to the model: sampling, scores, eviction, bookkeeping.

    python benchmarks/decode_overhead.py [--rounds 9] [--record]

Three ways to decode the same number of tokens with the default model, batch and cache, in turns in one
process. `transformers` is the bare model with its own SDPA and dense DynamicCache: prefill, then one
forward of backbone and LM head per token, nothing drawn. `pool` is the same on our pool of budget +
interval slots, without eviction. `loop` is generate(). Printed: median milliseconds per token, and the
medians of loop over the other two, run by run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import command_line
import record
import torch
from sampled import sample
from transformers import DynamicCache, PreTrainedModel

from lit_rlkv.config.schema import AlgorithmConfig, Config, RolloutConfig
from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import head_logits, hidden_states
from lit_rlkv.models.presets import tiny_qwen3

NAME = "decode_overhead"
ROLLOUT, CACHE = RolloutConfig(), Config().cache
BATCH = ROLLOUT.n_prompts * AlgorithmConfig().group_size
NEW = ROLLOUT.max_new_tokens
PROMPT, VOCAB = 10, 51
"""Those of the default task."""


@torch.no_grad()
def bare_transformers(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    cache = DynamicCache(config=model.config)
    model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for _ in range(NEW - 1):
        model(input_ids[:, :1], past_key_values=cache, use_cache=True)


@torch.no_grad()
def bare_pool(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Slots are reused in turn once the pool is full."""
    n_free = CACHE.budget + CACHE.interval - PROMPT
    cache = SlotCache(
        CacheSpec.dense(), model.config.num_hidden_layers, BATCH, PROMPT + n_free, input_ids.device
    )
    positions = torch.arange(PROMPT).expand(BATCH, -1)
    is_prompt = torch.ones_like(input_ids, dtype=torch.bool)
    cache.begin(range(BATCH), is_prompt)
    with cache.feed(range(BATCH), is_prompt):
        head_logits(model, hidden_states(model, input_ids, positions, slot_cache=cache)[:, -1])
    for step in range(NEW - 1):
        if step % n_free == 0:
            cache.n_live.fill_(PROMPT)
        cache.advance()
        hidden = hidden_states(model, input_ids[:, :1], positions[:, -1:] + 1 + step, slot_cache=cache)
        head_logits(model, hidden[:, -1])


def full_loop(model: PreTrainedModel, input_ids: torch.Tensor, policy: str) -> None:
    sample(model, input_ids, replace(CacheSpec(**asdict(CACHE)), policy=policy), NEW)


def seconds(run: Callable[..., None], *arguments: object) -> float:
    started_at = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started_at


def median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--rounds", type=int, default=9)
    n_rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    plain = tiny_qwen3(VOCAB, 0, 1).eval()
    ours = tiny_qwen3(VOCAB, 0, 1)
    ours.load_state_dict(plain.state_dict())
    prepare_backbone(ours.eval())
    input_ids = torch.randint(2, VOCAB, (BATCH, PROMPT))
    print(f"{BATCH} rows, {NEW} new tokens, {CACHE.budget}+{CACHE.interval} slots; ms per token")
    print("policy     transformers    pool    loop  loop/transformers  loop/pool")
    for policy in UNTRAINED:
        times: dict[str, list[float]] = {"transformers": [], "pool": [], "loop": []}
        for _ in range(n_rounds + 1):
            times["transformers"].append(seconds(bare_transformers, plain, input_ids))
            times["pool"].append(seconds(bare_pool, ours, input_ids))
            times["loop"].append(seconds(full_loop, ours, input_ids, policy))
        times = {name: values[1:] for name, values in times.items()}  # the first round warms up
        ms = {name: 1e3 * statistics.median(values) / NEW for name, values in times.items()}
        ratios = {name: median_ratio(times["loop"], times[name]) for name in ("transformers", "pool")}
        print(
            f"{policy:10} {ms['transformers']:12.2f} {ms['pool']:7.2f} {ms['loop']:7.2f} "
            f"{ratios['transformers']:18.2f} {ratios['pool']:10.2f}"
        )
        row = {"policy": policy, "threads": torch.get_num_threads(), "ms_per_token": ms, "loop_over": ratios}
        record.append(NAME, row)


if __name__ == "__main__":
    main()
