"""How much the decode loop adds to the bare model: sampling, scores, eviction, bookkeeping, record of deaths.

    python benchmarks/decode_overhead.py [--rounds 9]

The bare forward is what any decoder must do: prefill, then per token one forward of backbone and LM head that
writes its keys into a pool of the same number of slots and attends to them; it draws nothing, evicts nothing,
records nothing. Both sides run in turns in one process. Printed: median per token, and the median of the
ratios of neighbouring runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import record
import torch
from transformers import PreTrainedModel

from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import head_logits, hidden_states
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.rollout import generate

BATCH, PROMPT, NEW, VOCAB = 256, 10, 40, 51
SPEC = {"budget": 16, "interval": 4, "sink": 1, "window": 3}


@torch.no_grad()
def bare_forward(model: PreTrainedModel, token_ids: torch.Tensor) -> None:
    """NEW - 1 decoded tokens without a decode loop's work; slots are reused in turn once the pool is full."""
    n_slots = SPEC["budget"] + SPEC["interval"]
    cache = SlotCache(
        CacheSpec.dense(), model.config.num_hidden_layers, torch.ones_like(token_ids).bool(), n_slots - PROMPT
    )
    positions = torch.arange(PROMPT).expand(BATCH, -1)
    hidden = hidden_states(model, token_ids, positions, slot_cache=cache)
    for step in range(NEW - 1):
        cache.advance(step % (n_slots - PROMPT))
        hidden = hidden_states(model, token_ids[:, :1], positions[:, -1:] + 1 + step, slot_cache=cache)
        head_logits(model, hidden[:, -1])


def full_loop(model: PreTrainedModel, token_ids: torch.Tensor, policy: str) -> None:
    """The same number of tokens through generate()."""
    generate(
        model,
        token_ids,
        torch.ones_like(token_ids),
        cache=CacheSpec(policy=policy, **SPEC),
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
    )


def seconds(run: Callable[[], None]) -> float:
    started_at = time.perf_counter()
    run()
    return time.perf_counter() - started_at


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    n_rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    model = prepare_backbone(tiny_qwen3(VOCAB, 0, 1))
    token_ids = torch.randint(2, VOCAB, (BATCH, PROMPT))
    print(f"{'policy':10} {'bare ms':>8} {'loop ms':>8} {'overhead':>9}   per token of {BATCH} rows")
    for policy in POLICIES:
        bare, loop = [], []
        for _ in range(n_rounds + 1):
            bare.append(seconds(lambda: bare_forward(model, token_ids)))
            loop.append(seconds(lambda policy=policy: full_loop(model, token_ids, policy)))
        ratios = [full / alone for full, alone in zip(loop[1:], bare[1:], strict=True)]
        row = {
            "policy": policy,
            "bare_ms_per_token": 1e3 * statistics.median(bare[1:]) / NEW,
            "loop_ms_per_token": 1e3 * statistics.median(loop[1:]) / NEW,
            "overhead": statistics.median(ratios) - 1,
            "spread": max(ratios) - min(ratios),
        }
        bare_ms, loop_ms = row["bare_ms_per_token"], row["loop_ms_per_token"]
        print(f"{policy:10} {bare_ms:8.2f} {loop_ms:8.2f} {row['overhead']:8.1%}")
        record.append("decode_overhead", row)


if __name__ == "__main__":
    main()
