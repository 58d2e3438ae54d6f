"""Decode attention: one query per sequence over a pool of slots, with the scores that eviction needs."""

from jaxtyping import Float, Float32, Int
from torch import Tensor

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.decode_attention import reference
from lit_rlkv.kernels.decode_attention.launch import fits

__all__ = ["decode_attention"]


def decode_attention(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    n_live: Int[Tensor, " batch"],
    scaling: float,
    *,
    softcap: float | None = None,
    received: Float32[Tensor, "batch kv_head slot"] | None = None,
    accumulates: bool = False,
    kernels: str | None = None,
) -> Float[Tensor, "batch kv_head group dim_v"]:
    """softmax(q·kᵀ·scaling) v over the live slots of each row, which are the first `n_live`.

    What the other slots hold is finite. Nothing waits for the device: a call can be captured in a CUDA graph.
    A row without a live slot gives 0.

    Args:
        softcap: bounds the logits smoothly, softcap · tanh(logits / softcap), before the softmax.
        received: written in place: the probability that each live slot received, as the mean over the query
            heads of its group; 0 in dead slots.
        accumulates: add the probabilities to what stands in `received` instead; the newest key, in slot
            n_live - 1, starts from 0.
        kernels: `auto`, `reference` or `triton`; None leaves it to `lit_rlkv.kernels.backend`. `auto` is the
            definition also for groups of more and wider heads than a program can hold.

    Raises:
        ValueError: the Triton kernel is asked for by name and cannot take the tensor; a group too large for
            the device is Triton's own to refuse.
    """
    attend = reference.decode_attention
    if uses_triton(query, kernels, fits=fits(query, values)):
        from lit_rlkv.kernels.decode_attention import kernel  # not at the top: Triton exists on Linux only

        attend = kernel.decode_attention
    return attend(
        query, keys, values, n_live, scaling, softcap=softcap, received=received, accumulates=accumulates
    )
