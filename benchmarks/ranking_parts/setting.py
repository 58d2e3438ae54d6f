"""Sizes of the ranking of policies and dtypes at equal bytes, and the cells that it measures."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kernels.quantization import quantized_bytes
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.models.backbone import head_dims
from lit_rlkv.planning.needs import CACHE, RECORDS, rollout_needs
from lit_rlkv.settings import DENSE

NAME = "ranking"
SINK, WINDOW, INTERVAL = 4, 8, 16
DTYPES = (None, "int8", "int4")
COMPUTE = torch.bfloat16
"""Bytes are those of a model in this dtype, whatever the dtype that a benchmark computes in."""
SLOTS, ALL = "slots", "slots and record"


@dataclass(frozen=True)
class Sizes:
    """Everything that decides how long a run takes."""

    slots: tuple[int, ...] = (32, 48, 64, 96)
    """Sizes of a head, as slots in 16 bit."""
    policies: tuple[str, ...] = UNTRAINED
    with_record: tuple[str, ...] = ()
    """Policies that are measured at equal bytes of slots and record, too."""
    rows: int = 8
    tokens: int = 225


FULL = Sizes()
FAST = Sizes(slots=(48,), policies=("streaming", "snapkv"), rows=2, tokens=97)


@dataclass(frozen=True)
class Cell:
    """A cache that has the bytes of `slots` slots in 16 bit, on one chunk of prompts."""

    policy: str
    """Its name, and after a blank an option that is turned on."""
    dtype: str | None
    slots: int | None
    """None: nothing is evicted."""
    counted: str = SLOTS
    """Things that the bytes hold: the slots alone, or all that is kept beside them, too."""
    chunk: int = 0
    rows: int = 0
    tokens: int = 0

    def described(self, model: str) -> dict:
        """Return what identifies this cell in the record."""
        return {"model": model, **asdict(self), "sink": SINK, "window": WINDOW, "interval": INTERVAL}


def cells(sizes: Sizes, chunks: Iterable[int]) -> Iterator[Cell]:
    """Return every cell, chunk by chunk, size by size, and dtype by dtype, because those share a prefill."""
    for chunk in chunks:
        place = {"chunk": chunk, "rows": sizes.rows, "tokens": sizes.tokens}
        for slots in sizes.slots:
            for dtype in DTYPES:
                if slots == sizes.slots[0]:
                    yield Cell(DENSE, dtype, None, **place)
                for policy in sizes.policies:
                    yield Cell(policy, dtype, slots, **place)
                if dtype is not None:
                    for policy in sizes.with_record:
                        yield Cell(policy, dtype, slots, ALL, **place)


def cache_of(cell: Cell, model: PreTrainedModel, n_prompt: int) -> CacheSpec:
    """Return the largest cache of a cell's policy and dtype that takes no more than its bytes.

    Args:
        n_prompt: tokens of the longest prompt.
    """
    if cell.slots is None:
        return CacheSpec(DENSE, dtype=cell.dtype)

    def with_slots(n_slots: int, dtype: str | None) -> CacheSpec:
        name, _, option = cell.policy.partition(" ")
        options = {option: True} if option else {}
        sizes = n_slots - INTERVAL, INTERVAL, SINK, WINDOW
        return CacheSpec(name, *sizes, dtype=dtype, policy_options=options)

    dim = max(head_dims(model))
    of_key = {dtype: quantized_bytes(dim, dtype, COMPUTE) for dtype in DTYPES}
    n_slots = cell.slots * of_key[None] // of_key[cell.dtype]
    if cell.counted == ALL:
        limit = sum(row_bytes(with_slots(cell.slots, None), model, n_prompt, cell.tokens).values())
        while sum(row_bytes(with_slots(n_slots, cell.dtype), model, n_prompt, cell.tokens).values()) > limit:
            n_slots -= 1
    return with_slots(n_slots, cell.dtype)


def row_bytes(cache: CacheSpec, model: PreTrainedModel, n_prompt: int, n_tokens: int) -> dict[str, int]:
    """Return the bytes of a sequence's slots, of its record, and of what a policy keeps beside them."""
    settings = RolloutConfig(n_prompts=1, max_new_tokens=n_tokens)
    needs = rollout_needs(model, cache, (1, n_prompt), settings, 1, COMPUTE, is_gpu=True)
    beside = ("columns of slots", "attention of slots", "latest queries")
    return {
        "slots": needs[CACHE],
        "record": sum(needs.get(name, 0) for name in RECORDS),
        "beside": sum(needs.get(name, 0) for name in beside),
    }
