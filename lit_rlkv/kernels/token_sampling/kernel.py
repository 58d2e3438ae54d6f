"""Token sampling in Triton: each logit is read once, and those of one block a second time.

With temperature T, x a row of logits, and G independent Gumbel noise, argmax(ln p + G) is a draw from p:

    block  = argmax over blocks of ln Σ_(v in block) exp(x_v / T) + G
    token  = argmax over the tokens of that block of x_v / T + G
    logp   = (x_token − m) / T − ln s,  m = max x,  s = Σ exp((x_v − m) / T)
    entropy = ln s − Σ exp((x_v − m) / T) (x_v − m) / (s T)

A block is drawn by its mass, and a token by its share of the block. Noise is therefore needed for the blocks
and for the tokens of one block, instead of for the whole vocabulary.

G = −ln(−ln u) with u from Philox (doi:10.1145/2063384.2063405), whose key is a seed in device memory and
whose counter is the token or block, the row, and which of the two it is.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import on_tensor_device, with_unit_stride
from lit_rlkv.kernels.token_sampling.reference import NoiseRows

BLOCK = 4096
"""Logits of a block: one program. A constant, because the blocks decide which noise draws which token."""
BLOCK_WARPS = 4
"""A thread loads 32 logits, 64 bytes in 16 bit."""
CHOICE_WARPS = 8
TOKEN, VOCAB_BLOCK = tl.constexpr(0), tl.constexpr(1)
"""Kinds of noise, in Philox' counter."""

NO_PEAK = tl.constexpr(-1e30)
"""The initial peak. It is finite, because the difference of two infinite peaks would be NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def _gumbel(seed, index, row, kind):
    """Return Gumbel noise, accurate to a few roundings in both tails, and never infinite."""
    bits, _, _, _ = tl.philox(seed, index, index * 0 + row, index * 0 + kind, index * 0)
    # u = 1 - v. The largest noise comes from the smallest v, all bits of which a rounded 1 - v would lose.
    v = (bits.to(tl.float32) + 0.5) * 2.0**-32
    u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    # -ln(1 - v) = 2 artanh(v / (2 - v)); the series up to t^9 has a relative error of 1e-9 below 1/4.
    t = v / (2.0 - v)
    square = t * t
    series = 2.0 * t * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    exponential = tl.where(v < 0.25, series, -LN_2 * tl.log2(u))
    return -LN_2 * tl.log2(exponential)


@triton.jit
@no_type_check
def _sum_blocks(logits, peaks, masses, moments, stride, vocab, temperature, BLOCK: tl.constexpr):
    """Write the peak m of one block of a row, Σ exp((x − m) / T), and Σ exp((x − m) / T) (x − m)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    peak = tl.maximum(tl.max(x, axis=0), NO_PEAK)
    below = x - peak
    e = tl.exp2(below * (LOG2_E / temperature))
    place = row * tl.num_programs(1) + block
    tl.store(peaks + place, peak)
    tl.store(masses + place, tl.sum(e, axis=0))
    # 0 · -inf would be NaN.
    tl.store(moments + place, tl.sum(e * tl.maximum(below, NO_PEAK), axis=0))


@triton.jit
@no_type_check
def _choose_token(
    logits, peaks, masses, moments, seed, noise_rows, tokens, logps, entropy, stride, vocab, n_blocks,
    temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed)
    noise_row = tl.load(noise_rows + row).to(tl.int32)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < n_blocks
    place = row * n_blocks + blocks
    peak = tl.load(peaks + place, mask=is_block, other=NO_PEAK)
    mass = tl.load(masses + place, mask=is_block, other=0.0)
    moment = tl.load(moments + place, mask=is_block, other=0.0)
    rate = LOG2_E / temperature
    top = tl.max(peak, axis=0)
    fall = peak - top
    scale = tl.exp2(fall * rate)
    total_mass = tl.sum(scale * mass, axis=0)
    log_mass = tl.log2(total_mass) * LN_2
    noise = _gumbel(seed, blocks, noise_row, VOCAB_BLOCK)
    block = _argmax(fall / temperature + tl.log2(mass) * LN_2 + noise, n_blocks)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    noise = _gumbel(seed, column, noise_row, TOKEN)
    score = (x - tl.max(x, axis=0)) / temperature + noise
    token = block * BLOCK + _argmax(score, vocab - block * BLOCK)
    chosen = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logps + row, (chosen - top) / temperature - log_mass)
    total_moment = tl.sum(scale * (moment + mass * fall), axis=0)
    tl.store(entropy + row, log_mass - total_moment / (total_mass * temperature))


@triton.jit
@no_type_check
def _argmax(score, size):
    """Return the first index of the largest score, below `size` even if no score is a number."""
    score = tl.where(score == score, score, -float("inf"))
    return tl.minimum(tl.argmax(score, axis=0, tie_break_left=True), size - 1)


def sample_tokens(
    logits: Float[Tensor, "row vocab"],
    temperature: float,
    generator: torch.Generator | None,
    noise_rows: NoiseRows | None = None,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
    """Run `reference.sample_tokens` in Triton."""
    tokens, logps, _ = sample_tokens_and_entropy(logits, temperature, generator, noise_rows)
    return tokens, logps


def sample_tokens_and_entropy(
    logits: Float[Tensor, "row vocab"],
    temperature: float,
    generator: torch.Generator | None,
    noise_rows: NoiseRows | None = None,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Run `reference.sample_tokens_and_entropy` in Triton."""
    # The seed stays on the device. A captured graph draws another one at every replay, as it would eagerly.
    seed = torch.empty(1, dtype=torch.int64, device=logits.device).random_(generator=generator)
    return sample_with_seed(logits, temperature, seed, None if noise_rows is None else noise_rows.index)


@on_tensor_device
def sample_with_seed(
    logits: Float[Tensor, "row vocab"],
    temperature: float,
    seed: Int[Tensor, "1"],
    noise_rows: Int[Tensor, " row"] | None = None,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Return tokens, log-probs and entropies; the noise depends on the seed and the noise row of each row.

    Args:
        noise_rows: by default the index of each row.
    """
    logits = with_unit_stride(logits)
    n_rows, vocab = logits.shape
    n_blocks = triton.cdiv(vocab, BLOCK)
    device = logits.device
    tokens = torch.empty(n_rows, dtype=torch.int64, device=device)
    logps, entropy = (torch.empty(n_rows, dtype=torch.float32, device=device) for _ in range(2))
    sums = [torch.empty(n_rows, n_blocks, dtype=torch.float32, device=device) for _ in range(3)]
    if noise_rows is None:
        noise_rows = torch.arange(n_rows, device=device)
    if n_rows > 0:
        _sum_blocks[n_rows, n_blocks](
            logits, *sums, logits.stride(0), vocab, temperature, BLOCK=BLOCK, num_warps=BLOCK_WARPS
        )
        _choose_token[(n_rows,)](
            logits, *sums, seed, noise_rows, tokens, logps, entropy, logits.stride(0), vocab, n_blocks,
            temperature, BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(n_blocks), num_warps=CHOICE_WARPS,
        )  # fmt: skip
    return tokens, logps, entropy
