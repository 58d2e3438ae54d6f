"""Calls of every operation's Triton kernels at real sizes, on tensors without data, to be compiled only."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lit_rlkv.kernels.decode_attention import kernel as decode_kernel
from lit_rlkv.kernels.evict import kernel as evict_kernel
from lit_rlkv.kernels.shadow_attention import launch
from lit_rlkv.kernels.slot_scores.keys import kernel as keys_kernel
from lit_rlkv.kernels.slot_scores.window import kernel as window_kernel
from lit_rlkv.kernels.token_logps import kernel as logits_kernel

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
        query = empty(batch, KV_HEADS, GROUP, dim, dtype=dtype)
        keys, values = (empty(batch, KV_HEADS, 4096, dim, dtype=dtype) for _ in range(2))
        received = floats(batch, KV_HEADS, 4096)
        pool = (query, keys, values, integers(batch), dim**-0.5)
        decode_kernel.decode_attention(*pool)
        decode_kernel.decode_attention(*pool, received=received, accumulates=True)


def evict(dtype: torch.dtype, dim: int) -> None:
    """With a running score and without."""
    shape = (BATCH, KV_HEADS, SLOTS)
    keys, values = (empty(*shape, dim, dtype=dtype) for _ in range(2))
    death = empty(BATCH, KV_HEADS, SEQ, dtype=torch.int32)
    rows = (flags(BATCH), integers(BATCH), integers(BATCH))
    for attention in (floats(*shape), None):
        pool = (floats(*shape), keys, values, integers(*shape), attention, death)
        evict_kernel.evict(*pool, *rows, budget=1024, sink=4, window=WINDOW)


def slot_scores(dtype: torch.dtype, dim: int) -> None:
    """Every score."""
    shape = (BATCH, KV_HEADS, SLOTS)
    keys, values = (empty(*shape, dim, dtype=dtype) for _ in range(2))
    queries = empty(BATCH, KV_HEADS, GROUP, WINDOW, dim, dtype=dtype)
    is_live, is_recent, is_due = flags(*shape), flags(*shape), flags(BATCH)
    looked_at = (queries, keys, integers(*shape), integers(BATCH, WINDOW), is_live)
    keys_kernel.key_norm(keys, is_due)
    keys_kernel.key_direction_similarity(keys, is_live, is_due)
    keys_kernel.redundancy(keys, is_live, is_due)
    window_kernel.mean_window_attention(*looked_at, dim**-0.5, is_due)
    window_kernel.peak_window_attention(*looked_at, is_recent, dim**-0.5, is_due)
    window_kernel.expected_attention(queries, keys, values, is_live, dim**-0.5, is_due)


def shadow_attention(dtype: torch.dtype, dim: int) -> None:
    """Forward and backward, following lists of the living and without them."""
    query = empty(1, GROUP * KV_HEADS, SEQ, dim, dtype=dtype)
    key, value = (empty(1, KV_HEADS, SEQ, dim, dtype=dtype) for _ in range(2))
    death = empty(1, KV_HEADS, SEQ, dtype=torch.int32)
    for n_slots in (N_LISTED, 0):
        inputs = launch.Inputs(query, key, value, death, dim**-0.5, None, BLOCK, n_slots)
        out, lse = launch.forward(inputs)
        slot_of = empty(1, KV_HEADS, SEQ, dtype=torch.int32) if n_slots else None
        launch.backward(inputs, torch.empty_like(out), torch.empty_like(lse), out, lse, slot_of)


def token_logps(dtype: torch.dtype, dim: int) -> None:
    """A chunk's log-probs and KL, forward and backward; the head's dimension does not matter."""
    p_logits, q_logits = (empty(POSITIONS, VOCAB, dtype=dtype) for _ in range(2))
    tokens, upstream = integers(POSITIONS), floats(POSITIONS)
    _, _, stats = logits_kernel.chosen_forward(p_logits, tokens, 1.0)
    logits_kernel.chosen_backward(upstream, p_logits, tokens, stats, 1.0)
    kl, stats = logits_kernel.kl_forward(p_logits, q_logits, 1.0)
    for needs_q in (False, True):
        logits_kernel.kl_backward(upstream, p_logits, q_logits, kl, stats, 1.0, True, needs_q)


CALLS: dict[str, Calls] = {
    call.__name__: call for call in (decode_attention, evict, slot_scores, shadow_attention, token_logps)
}
