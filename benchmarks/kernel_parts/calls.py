"""Calls of every operation's Triton kernels on tensors without data, to be compiled only."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lit_rlkv.kernels.decode_attention import kernel as decode_kernel
from lit_rlkv.kernels.decode_attention.launch import fits
from lit_rlkv.kernels.evict import kernel as evict_kernel
from lit_rlkv.kernels.quantization import KV_DTYPES, SCALE_DTYPE
from lit_rlkv.kernels.shadow_attention import launch
from lit_rlkv.kernels.slot_scores import keys_kernel, window_kernel
from lit_rlkv.kernels.token_logps import kernel as logits_kernel
from lit_rlkv.kernels.token_sampling import kernel as sampling_kernel

BATCH, KV_HEADS, GROUP, SLOTS, WINDOW, SEQ = 64, 8, 4, 1152, 16, 16_384
POOL = (BATCH, KV_HEADS, SLOTS)
N_LISTED = 1280
"""Slots of a plan for a budget of 1024 with an interval of 128."""
POSITIONS, VOCAB = 1766, 151_936
ANY_ADDRESS = 50_257
"""A vocabulary whose rows of logits start at any address."""
BLOCK = 128


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


integers = partial(empty, dtype=torch.int64)
floats = partial(empty, dtype=torch.float32)
flags = partial(empty, dtype=torch.bool)


def attend(
    dtype: torch.dtype,
    dim: int,
    batch: int,
    *,
    kv_heads: int = KV_HEADS,
    group: int = GROUP,
    n_slots: int = 4096,
    has_scores: bool = False,
    accumulates: bool = False,
    softcap: float | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Decode attention of one step."""
    query = empty(batch, kv_heads, group, dim, dtype=dtype)
    keys, *key_scales = stored((batch, kv_heads, n_slots), dim, dtype, kv_dtype)
    values, *value_scales = stored((batch, kv_heads, n_slots), dim, dtype, kv_dtype)
    if not fits(query, keys, values, kv_dtype=kv_dtype):
        return  # the definition runs instead
    received = floats(batch, kv_heads, n_slots) if has_scores else None
    decode_kernel.decode_attention(
        *(query, keys, values, integers(batch), dim**-0.5),
        softcap=softcap,
        received=received,
        accumulates=accumulates,
        kv_dtype=kv_dtype,
        scales=[*key_scales, *value_scales],
    )


def stored(shape: tuple[int, int, int], dim: int, dtype: torch.dtype, kv_dtype: str | None) -> list[Tensor]:
    """Return a pool of numbers, or of codes and scales."""
    if kv_dtype is None:
        return [empty(*shape, dim, dtype=dtype)]
    n_bytes, n_scales = (dim // 2, 2) if kv_dtype == "int4" else (dim, 1)
    return [empty(*shape, n_bytes, dtype=torch.uint8), empty(*shape, n_scales, dtype=SCALE_DTYPE)]


def evict(
    dtype: torch.dtype,
    dim: int,
    shape: tuple[int, int, int] = POOL,
    budget: int = 1024,
    *,
    has_attention: bool = True,
    has_short_numbers: bool = False,
    kv_dtype: str | None = None,
) -> None:
    """A compaction; with short numbers scores and columns have fewer bits."""
    score_dtype, column_dtype = (dtype, torch.int32) if has_short_numbers else (torch.float32, torch.int64)
    keys, *key_scales = stored(shape, dim, dtype, kv_dtype)
    values, *value_scales = stored(shape, dim, dtype, kv_dtype)
    scales = [*key_scales, *value_scales]
    evicted_at = empty(*shape[:2], SEQ, dtype=torch.int32)
    scores, columns = empty(*shape, dtype=score_dtype), empty(*shape, dtype=column_dtype)
    attention = empty(*shape, dtype=score_dtype) if has_attention else None
    pool = (scores, keys, values, columns, attention, evicted_at)
    rows = (flags(shape[0]), integers(shape[0]), integers(shape[0]))
    limits = {"budget": budget, "sink": min(4, budget), "window": min(WINDOW, budget)}
    evict_kernel.evict(*pool, *rows, scales=scales, **limits)


def score(
    dtype: torch.dtype,
    dim: int,
    shape: tuple[int, int, int] = POOL,
    group: int = GROUP,
    window: int = WINDOW,
    *,
    has_due: bool = False,
) -> None:
    """Every score of slots."""
    batch, kv_heads, _ = shape
    keys, values = (empty(*shape, dim, dtype=dtype) for _ in range(2))
    queries = empty(batch, kv_heads, group, window, dim, dtype=dtype)
    is_live, is_recent, is_due = flags(*shape), flags(*shape), flags(batch) if has_due else None
    looked_at = (queries, keys, integers(*shape), integers(batch, window), is_live)
    keys_kernel.key_norm(keys, is_due)
    keys_kernel.key_direction_similarity(keys, is_live, is_due)
    keys_kernel.redundancy(keys, is_live, is_due)
    window_kernel.mean_window_attention(*looked_at, dim**-0.5, is_due)
    window_kernel.peak_window_attention(*looked_at, is_recent, dim**-0.5, is_due)
    window_kernel.expected_attention(queries, keys, values, is_live, dim**-0.5, is_due)


def learn(
    dtype: torch.dtype,
    dim: int,
    n_slots: int,
    *,
    kv_heads: int = KV_HEADS,
    group: int = GROUP,
    seq: int = SEQ,
    block: int = BLOCK,
    softcap: float | None = None,
) -> None:
    """Shadow attention forward and backward, following lists of the living unless `n_slots` is 0."""
    query = empty(1, group * kv_heads, seq, dim, dtype=dtype)
    key, value = (empty(1, kv_heads, seq, dim, dtype=dtype) for _ in range(2))
    evicted_at = empty(1, kv_heads, seq, dtype=torch.int32)
    inputs = launch.Inputs(query, key, value, evicted_at, dim**-0.5, softcap, block, n_slots)
    out, lse = launch.forward(inputs)
    slot_of = empty(1, kv_heads, seq, dtype=torch.int32) if n_slots else None
    launch.backward(inputs, torch.empty_like(out), torch.empty_like(lse), out, lse, slot_of)


def compare(
    dtype: torch.dtype, dim: int, n_rows: int, vocab: int, learns: Sequence[tuple[bool, bool]]
) -> None:
    """A chunk's log-probs and KL, forward and backward; the head's dimension does not matter."""
    p_logits, q_logits = (empty(n_rows, vocab, dtype=dtype) for _ in range(2))
    tokens, upstream = integers(n_rows), floats(n_rows)
    _, _, stats = logits_kernel.chosen_forward(p_logits, tokens, 1.0)
    logits_kernel.chosen_backward(upstream, p_logits, tokens, stats, 1.0)
    kl, stats = logits_kernel.kl_forward(p_logits, q_logits, 1.0)
    for needs in learns:
        logits_kernel.kl_backward(upstream, p_logits, q_logits, kl, stats, 1.0, *needs)


def draw(dtype: torch.dtype, dim: int, n_rows: int, vocab: int, temperature: float) -> None:
    """Tokens of a decode step; the head's dimension does not matter."""
    sampling_kernel.sample_with_seed(empty(n_rows, vocab, dtype=dtype), temperature, integers(1))


ADDED = {"has_scores": True, "accumulates": True}
Call = Callable[[torch.dtype, int], None]
"""A call, which takes the type of its numbers and the dimension of a head."""
CALLS: dict[str, dict[str, list[Call]]] = {
    "usual": {
        # a batch that fills the device, and one row, whose slots are shared
        "decode_attention": [partial(attend, batch=n, **kept) for n in (BATCH, 1) for kept in ({}, ADDED)],
        "evict": [partial(evict, has_attention=has_attention) for has_attention in (True, False)],
        "slot_scores": [partial(score, has_due=True)],
        "shadow_attention": [partial(learn, n_slots=n_slots) for n_slots in (N_LISTED, 0)],
        "token_logps": [
            partial(compare, n_rows=POSITIONS, vocab=VOCAB, learns=[(True, False), (True, True)])
        ],
        "token_sampling": [partial(draw, n_rows=BATCH, vocab=VOCAB, temperature=1.0)],
    },
    "rare": {
        "decode_attention": [
            *(partial(attend, batch=n, has_scores=True) for n in (BATCH, 1)),
            *(partial(attend, batch=n, softcap=50.0, **ADDED) for n in (BATCH, 1)),
            *(partial(attend, batch=BATCH, group=group, **ADDED) for group in (1, 64, 128)),
            partial(attend, batch=1, kv_heads=1, group=1, n_slots=1, **ADDED),
            *(partial(attend, batch=BATCH, kv_dtype=kv_dtype, **ADDED) for kv_dtype in KV_DTYPES),
            *(partial(attend, batch=1, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES),
        ],
        "evict": [
            partial(evict, has_short_numbers=True),
            partial(evict, shape=(1, 1, 1), budget=1),
            *(partial(evict, kv_dtype=kv_dtype) for kv_dtype in ("int8", "int4")),
        ],
        # a window that is longer than a tile, and one slot by one query
        "slot_scores": [partial(score, window=64), partial(score, shape=(1, 1, 1), group=1, window=1)],
        "shadow_attention": [
            *(partial(learn, n_slots=n_slots, softcap=50.0) for n_slots in (N_LISTED, 0)),
            partial(learn, n_slots=N_LISTED, block=16, group=1),
            *(partial(learn, n_slots=n_slots, kv_heads=1, group=1, seq=1) for n_slots in (16, 0)),
        ],
        "token_logps": [
            partial(compare, n_rows=POSITIONS, vocab=ANY_ADDRESS, learns=[(False, True)]),
            partial(compare, n_rows=1, vocab=1, learns=[(True, True)]),
        ],
        "token_sampling": [
            partial(draw, n_rows=BATCH, vocab=ANY_ADDRESS, temperature=0.7),
            partial(draw, n_rows=1, vocab=1, temperature=0.7),
        ],
    },
}
