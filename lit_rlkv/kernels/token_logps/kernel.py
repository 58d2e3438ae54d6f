"""Log-probs of chosen tokens and KL of two policies from logits, in Triton; each logit is read once.

With temperature T, the peak m = max x, e = exp((x − m) / T) and the mass s = Σ e of one row of logits x:

    logp(v)   = (x_v − m) / T − ln s             d logp(v) / dx = (1[v] − e / s) / T
    entropy   = ln s − Σ e (x − m) / (s T)
    KL(p ‖ q) = Σ e_p ((x_p − m_p) − (x_q − m_q)) / (s_p T) − ln s_p + ln s_q
        d KL / dx_p = p (log p − log q − KL) / T        d KL / dx_q = (q − p) / T

Forward: one program reads one row in tiles [N_DEEP, N_LANES]. Every lane keeps a running peak and sums
relative to it, so threads exchange nothing per tile; lanes are combined once, at the end.
Backward: one program per tile, using the peak and log2(mass) that the forward pass saved.

The peak is subtracted before any multiplication, because the compiler may fuse a product with a sum. Equal
logits therefore have a KL of exactly 0. A logit of -inf has probability 0 and adds to no sum.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import on_tensor_device, with_unit_stride

N_DEEP = 4
N_LANES = 2048
N_WARPS = 8
"""A thread loads 8 neighbours from each of the tile's four rows: 128 bytes of float32 in flight."""

BLOCK = 4096
"""Logits per program in the backward pass."""

NO_PEAK = tl.constexpr(-1e30)
"""The initial peak. It is finite, because the difference of two infinite peaks would be NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def _chosen_forward(
    logits, tokens, logps, entropy, stats, stride, n_rows, vocab, temperature,
    N_DEEP: tl.constexpr, N_LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    rate = LOG2_E / temperature
    tile = tl.arange(0, N_DEEP)[:, None] * N_LANES + tl.arange(0, N_LANES)[None, :]
    peak = tl.full([N_LANES], NO_PEAK, tl.float32)
    mass = tl.zeros([N_LANES], tl.float32)
    moment = tl.zeros([N_LANES], tl.float32)
    for start in range(0, vocab, N_DEEP * N_LANES):
        column = start + tile
        x = tl.load(logits + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        fall = peak - higher
        scale = tl.exp2(fall * rate)
        below = x - higher[None, :]
        e = tl.exp2(below * rate)
        moment = scale * (moment + mass * fall) + tl.sum(e * tl.maximum(below, NO_PEAK), axis=0)
        mass = scale * mass + tl.sum(e, axis=0)
        peak = higher
    top = tl.max(peak, axis=0)
    fall = peak - top
    scale = tl.exp2(fall * rate)
    total_moment = tl.sum(scale * (moment + mass * fall), axis=0)
    total_mass = tl.sum(scale * mass, axis=0)
    log2_mass = tl.log2(total_mass)
    token = tl.load(tokens + row)
    is_in_vocab = (token >= 0) & (token < vocab)
    chosen = tl.load(logits + token, mask=is_in_vocab, other=float("nan")).to(tl.float32)
    tl.store(logps + row, (chosen - top) / temperature - log2_mass * LN_2)
    tl.store(entropy + row, log2_mass * LN_2 - total_moment / (total_mass * temperature))
    tl.store(stats + row, top)
    tl.store(stats + n_rows + row, log2_mass)


@triton.jit
@no_type_check
def _chosen_backward(
    upstream, logits, tokens, stats, gradient, stride, n_rows, vocab, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_logit = column < vocab
    x = tl.load(logits + row * stride + column, mask=is_logit, other=-float("inf")).to(tl.float32)
    peak, log2_mass = tl.load(stats + row), tl.load(stats + n_rows + row)
    prob = tl.exp2((x - peak) * (LOG2_E / temperature) - log2_mass)
    is_chosen = column == tl.load(tokens + row)
    slope = (tl.where(is_chosen, 1.0, 0.0) - prob) * (tl.load(upstream + row) / temperature)
    tl.store(gradient + row * vocab + column, slope.to(gradient.dtype.element_ty), mask=is_logit)


@triton.jit
@no_type_check
def _kl_forward(
    p_logits, q_logits, kl, stats, p_stride, q_stride, n_rows, vocab, temperature,
    N_DEEP: tl.constexpr, N_LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_logits += row * p_stride
    q_logits += row * q_stride
    rate = LOG2_E / temperature
    tile = tl.arange(0, N_DEEP)[:, None] * N_LANES + tl.arange(0, N_LANES)[None, :]
    p_peak = tl.full([N_LANES], NO_PEAK, tl.float32)
    q_peak = tl.full([N_LANES], NO_PEAK, tl.float32)
    p_mass = tl.zeros([N_LANES], tl.float32)
    q_mass = tl.zeros([N_LANES], tl.float32)
    moment = tl.zeros([N_LANES], tl.float32)
    for start in range(0, vocab, N_DEEP * N_LANES):
        column = start + tile
        is_logit = column < vocab
        x_p = tl.load(p_logits + column, mask=is_logit, other=-float("inf")).to(tl.float32)
        x_q = tl.load(q_logits + column, mask=is_logit, other=-float("inf")).to(tl.float32)
        p_higher = tl.maximum(p_peak, tl.max(x_p, axis=0))
        q_higher = tl.maximum(q_peak, tl.max(x_q, axis=0))
        p_fall = p_peak - p_higher
        q_fall = q_peak - q_higher
        p_scale = tl.exp2(p_fall * rate)
        p_below = x_p - p_higher[None, :]
        q_below = x_q - q_higher[None, :]
        e_p = tl.exp2(p_below * rate)
        ratio = tl.where(e_p > 0, e_p * (p_below - q_below), 0.0)
        moment = p_scale * (moment + p_mass * (p_fall - q_fall)) + tl.sum(ratio, axis=0)
        p_mass = p_scale * p_mass + tl.sum(e_p, axis=0)
        q_mass = tl.exp2(q_fall * rate) * q_mass + tl.sum(tl.exp2(q_below * rate), axis=0)
        p_peak = p_higher
        q_peak = q_higher
    p_top = tl.max(p_peak, axis=0)
    q_top = tl.max(q_peak, axis=0)
    p_fall = p_peak - p_top
    q_fall = q_peak - q_top
    p_scale = tl.exp2(p_fall * rate)
    total_moment = tl.sum(p_scale * (moment + p_mass * (p_fall - q_fall)), axis=0)
    total_mass = tl.sum(p_scale * p_mass, axis=0)
    p_log2_mass = tl.log2(total_mass)
    q_log2_mass = tl.log2(tl.sum(tl.exp2(q_fall * rate) * q_mass, axis=0))
    log_ratio_of_masses = (p_log2_mass - q_log2_mass) * LN_2
    tl.store(kl + row, total_moment / (total_mass * temperature) - log_ratio_of_masses)
    tl.store(stats + row, p_top)
    tl.store(stats + n_rows + row, p_log2_mass)
    tl.store(stats + 2 * n_rows + row, q_top)
    tl.store(stats + 3 * n_rows + row, q_log2_mass)


@triton.jit
@no_type_check
def _kl_backward(
    upstream, p_logits, q_logits, kl, stats, p_gradient, q_gradient, p_stride, q_stride, n_rows, vocab,
    temperature, NEEDS_P: tl.constexpr, NEEDS_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_logit = column < vocab
    x_p = tl.load(p_logits + row * p_stride + column, mask=is_logit, other=-float("inf")).to(tl.float32)
    x_q = tl.load(q_logits + row * q_stride + column, mask=is_logit, other=-float("inf")).to(tl.float32)
    p_below = x_p - tl.load(stats + row)
    p_log2_mass = tl.load(stats + n_rows + row)
    q_below = x_q - tl.load(stats + 2 * n_rows + row)
    q_log2_mass = tl.load(stats + 3 * n_rows + row)
    rate = LOG2_E / temperature
    p = tl.exp2(p_below * rate - p_log2_mass)
    per_nat = 1.0 / temperature
    weight = tl.load(upstream + row) * per_nat
    if NEEDS_P:
        log_ratio = (p_below - q_below) * per_nat - (p_log2_mass - q_log2_mass) * LN_2
        slope = tl.where(p > 0, p * (log_ratio - tl.load(kl + row)), 0.0) * weight
        tl.store(p_gradient + row * vocab + column, slope.to(p_gradient.dtype.element_ty), mask=is_logit)
    if NEEDS_Q:
        slope = (tl.exp2(q_below * rate - q_log2_mass) - p) * weight
        tl.store(q_gradient + row * vocab + column, slope.to(q_gradient.dtype.element_ty), mask=is_logit)


@on_tensor_device
def chosen_forward(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"], Float[Tensor, "2 position"]]:
    """Return log-probs, entropies, and each row's peak and log2(mass) for the backward pass."""
    outputs = empty_chosen_outputs(logits, tokens, temperature)
    logits, tokens = with_unit_stride(logits), tokens.contiguous()
    n_rows, vocab = logits.shape
    if n_rows > 0:
        _chosen_forward[(n_rows,)](
            logits, tokens, *outputs, logits.stride(0), n_rows, vocab, temperature,
            N_DEEP=N_DEEP, N_LANES=N_LANES, num_warps=N_WARPS,
        )  # fmt: skip
    return outputs


@on_tensor_device
def chosen_backward(
    upstream: Float[Tensor, " position"],
    logits: Float[Tensor, "position vocab"],
    tokens: Int[Tensor, " position"],
    stats: Float[Tensor, "2 position"],
    temperature: float,
) -> Float[Tensor, "position vocab"]:
    """Return the gradient of the logits, given the gradient of the log-probs."""
    gradient = empty_chosen_gradient(upstream, logits, tokens, stats, temperature)
    logits, tokens = with_unit_stride(logits), tokens.contiguous()
    n_rows, vocab = logits.shape
    if n_rows > 0:
        _chosen_backward[(n_rows, triton.cdiv(vocab, BLOCK))](
            upstream.contiguous(), logits, tokens, stats, gradient, logits.stride(0), n_rows, vocab,
            temperature, BLOCK=BLOCK, num_warps=N_WARPS,
        )  # fmt: skip
    return gradient


@on_tensor_device
def kl_forward(
    p_logits: Float[Tensor, "position vocab"], q_logits: Float[Tensor, "position vocab"], temperature: float
) -> tuple[Float[Tensor, " position"], Float[Tensor, "4 position"]]:
    """Return KL(p ‖ q), and each row's peak and log2(mass): of p, then of q."""
    outputs = empty_kl_outputs(p_logits, q_logits, temperature)
    p_logits, q_logits = with_unit_stride(p_logits), with_unit_stride(q_logits)
    n_rows, vocab = p_logits.shape
    if n_rows > 0:
        _kl_forward[(n_rows,)](
            p_logits, q_logits, *outputs, p_logits.stride(0), q_logits.stride(0), n_rows, vocab, temperature,
            N_DEEP=N_DEEP, N_LANES=N_LANES, num_warps=N_WARPS,
        )  # fmt: skip
    return outputs


@on_tensor_device
def kl_backward(
    upstream: Float[Tensor, " position"],
    p_logits: Float[Tensor, "position vocab"],
    q_logits: Float[Tensor, "position vocab"],
    kl: Float[Tensor, " position"],
    stats: Float[Tensor, "4 position"],
    temperature: float,
    needs_p: bool,
    needs_q: bool,
) -> tuple[Float[Tensor, "p_position vocab"], Float[Tensor, "q_position vocab"]]:
    """Return the gradients of both logits; a gradient that is not needed has no rows."""
    gradients = empty_kl_gradients(upstream, p_logits, q_logits, kl, stats, temperature, needs_p, needs_q)
    p_logits, q_logits = with_unit_stride(p_logits), with_unit_stride(q_logits)
    n_rows, vocab = p_logits.shape
    if n_rows > 0:
        _kl_backward[(n_rows, triton.cdiv(vocab, BLOCK))](
            upstream.contiguous(), p_logits, q_logits, kl, stats, *gradients,
            p_logits.stride(0), q_logits.stride(0), n_rows, vocab, temperature,
            NEEDS_P=needs_p, NEEDS_Q=needs_q, BLOCK=BLOCK, num_warps=N_WARPS,
        )  # fmt: skip
    return gradients


def empty_chosen_outputs(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs of `chosen_forward`, in float32."""
    return _floats(logits), _floats(logits), _floats(logits, 2)


def empty_chosen_gradient(upstream: Tensor, logits: Tensor, *_: Any) -> Tensor:
    """Allocate the output of `chosen_backward`, contiguous and in the dtype of the logits."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def empty_kl_outputs(p_logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocate the outputs of `kl_forward`, in float32."""
    return _floats(p_logits), _floats(p_logits, 4)


def empty_kl_gradients(upstream: Tensor, p_logits: Tensor, q_logits: Tensor, *others: Any) -> Any:
    """Allocate the outputs of `kl_backward`; a gradient that is not needed has no rows."""
    *_, needs_p, needs_q = others
    return tuple(
        torch.empty((len(logits) * is_needed, logits.shape[1]), dtype=logits.dtype, device=logits.device)
        for logits, is_needed in ((p_logits, needs_p), (q_logits, needs_q))
    )


def _floats(logits: Tensor, *lead: int) -> Tensor:
    return torch.empty((*lead, logits.shape[0]), dtype=torch.float32, device=logits.device)
