"""Calls of every operation's Triton kernels on tensors without data, to be compiled only.

`USUAL` calls are at real sizes. `RARE` ones are what else the operations take: capped logits, no list of due
rows, groups of many heads, sizes of 1, for which the compiler writes kernels of their own.
"""

from collections.abc import Callable
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
N_LISTED = 1280
"""Slots of a plan for a budget of 1024 with an interval of 128."""
POSITIONS, VOCAB = 1766, 151_936
BLOCK = 128

Calls = Callable[[torch.dtype, int], object]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


integers = partial(empty, dtype=torch.int64)
floats = partial(empty, dtype=torch.float32)
flags = partial(empty, dtype=torch.bool)


def decode_attention(dtype: torch.dtype, dim: int) -> None:
    """A batch that fills the device, with scores and without, and one row, whose slots are shared."""
    for batch in (BATCH, 1):
        attend(dtype, dim, batch)
        attend(dtype, dim, batch, has_scores=True, accumulates=True)


def decode_attention_rarely(dtype: torch.dtype, dim: int) -> None:
    """Capped logits, scores that are written anew, very many query heads of a KV head, one of all, codes."""
    for batch in (BATCH, 1):
        attend(dtype, dim, batch, has_scores=True)
        attend(dtype, dim, batch, has_scores=True, accumulates=True, softcap=50.0)
    for group in (1, 64, 128):
        attend(dtype, dim, BATCH, group=group, has_scores=True, accumulates=True)
    attend(dtype, dim, batch=1, kv_heads=1, group=1, n_slots=1, has_scores=True, accumulates=True)
    for kv_dtype in KV_DTYPES:
        attend(dtype, dim, BATCH, has_scores=True, accumulates=True, kv_dtype=kv_dtype)
        attend(dtype, dim, batch=1, kv_dtype=kv_dtype)


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


def evict(dtype: torch.dtype, dim: int) -> None:
    """With a running score and without."""
    for has_attention in (True, False):
        compact(dtype, dim, (BATCH, KV_HEADS, SLOTS), 1024, has_attention=has_attention)


def evict_rarely(dtype: torch.dtype, dim: int) -> None:
    """Scores and columns of fewer bits, a pool of one slot, and pools of codes."""
    numbers = {"score_dtype": dtype, "column_dtype": torch.int32}
    compact(dtype, dim, (BATCH, KV_HEADS, SLOTS), 1024, has_attention=True, **numbers)
    compact(dtype, dim, (1, 1, 1), 1, has_attention=True)
    for kv_dtype in ("int8", "int4"):
        compact(dtype, dim, (BATCH, KV_HEADS, SLOTS), 1024, has_attention=True, kv_dtype=kv_dtype)


def compact(
    dtype: torch.dtype,
    dim: int,
    shape: tuple[int, int, int],
    budget: int,
    *,
    has_attention: bool,
    score_dtype: torch.dtype = torch.float32,
    column_dtype: torch.dtype = torch.int64,
    kv_dtype: str | None = None,
) -> None:
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


def slot_scores(dtype: torch.dtype, dim: int) -> None:
    """Every score."""
    score(dtype, dim, (BATCH, KV_HEADS, SLOTS), GROUP, WINDOW, has_due=True)


def slot_scores_rarely(dtype: torch.dtype, dim: int) -> None:
    """Cases: all rows by a window longer than a tile, and one slot by one query."""
    score(dtype, dim, (BATCH, KV_HEADS, SLOTS), GROUP, 64, has_due=False)
    score(dtype, dim, (1, 1, 1), 1, 1, has_due=False)


def score(
    dtype: torch.dtype, dim: int, shape: tuple[int, int, int], group: int, window: int, *, has_due: bool
) -> None:
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


def shadow_attention(dtype: torch.dtype, dim: int) -> None:
    """Forward and backward, following lists of the living and without them."""
    for n_slots in (N_LISTED, 0):
        learn(dtype, dim, n_slots)


def shadow_attention_rarely(dtype: torch.dtype, dim: int) -> None:
    """Capped logits, blocks of the fewest queries, a query head for every KV head, and one position."""
    for n_slots in (N_LISTED, 0):
        learn(dtype, dim, n_slots, softcap=50.0)
    learn(dtype, dim, N_LISTED, block=16, group=1)
    for n_slots in (16, 0):
        learn(dtype, dim, n_slots, kv_heads=1, group=1, seq=1)


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
    query = empty(1, group * kv_heads, seq, dim, dtype=dtype)
    key, value = (empty(1, kv_heads, seq, dim, dtype=dtype) for _ in range(2))
    evicted_at = empty(1, kv_heads, seq, dtype=torch.int32)
    inputs = launch.Inputs(query, key, value, evicted_at, dim**-0.5, softcap, block, n_slots)
    out, lse = launch.forward(inputs)
    slot_of = empty(1, kv_heads, seq, dtype=torch.int32) if n_slots else None
    launch.backward(inputs, torch.empty_like(out), torch.empty_like(lse), out, lse, slot_of)


def token_logps(dtype: torch.dtype, dim: int) -> None:
    """A chunk's log-probs and KL, forward and backward; the head's dimension does not matter."""
    compare(dtype, POSITIONS, VOCAB, needs_p=(True, True), needs_q=(False, True))


def token_logps_rarely(dtype: torch.dtype, dim: int) -> None:
    """A vocabulary whose rows start at any address, where only the other policy learns; and one position."""
    compare(dtype, POSITIONS, 50_257, needs_p=(False,), needs_q=(True,))
    compare(dtype, 1, 1, needs_p=(True,), needs_q=(True,))


def compare(
    dtype: torch.dtype, n_rows: int, vocab: int, *, needs_p: tuple[bool, ...], needs_q: tuple[bool, ...]
) -> None:
    p_logits, q_logits = (empty(n_rows, vocab, dtype=dtype) for _ in range(2))
    tokens, upstream = integers(n_rows), floats(n_rows)
    _, _, stats = logits_kernel.chosen_forward(p_logits, tokens, 1.0)
    logits_kernel.chosen_backward(upstream, p_logits, tokens, stats, 1.0)
    kl, stats = logits_kernel.kl_forward(p_logits, q_logits, 1.0)
    for needs in zip(needs_p, needs_q, strict=True):
        logits_kernel.kl_backward(upstream, p_logits, q_logits, kl, stats, 1.0, *needs)


def token_sampling(dtype: torch.dtype, dim: int) -> None:
    """A decode step of a batch; the head's dimension does not matter."""
    sampling_kernel.sample_with_seed(empty(BATCH, VOCAB, dtype=dtype), 1.0, integers(1))


def token_sampling_rarely(dtype: torch.dtype, dim: int) -> None:
    """A vocabulary whose rows start at any address, and one of a single token."""
    for shape in ((BATCH, 50_257), (1, 1)):
        sampling_kernel.sample_with_seed(empty(*shape, dtype=dtype), 0.7, integers(1))


USUAL: dict[str, Calls] = {
    "decode_attention": decode_attention,
    "evict": evict,
    "slot_scores": slot_scores,
    "shadow_attention": shadow_attention,
    "token_logps": token_logps,
    "token_sampling": token_sampling,
}
RARE: dict[str, Calls] = {
    "decode_attention": decode_attention_rarely,
    "evict": evict_rarely,
    "slot_scores": slot_scores_rarely,
    "shadow_attention": shadow_attention_rarely,
    "token_logps": token_logps_rarely,
    "token_sampling": token_sampling_rarely,
}
CALLS = {"usual": USUAL, "rare": RARE}
