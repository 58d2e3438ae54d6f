"""Variance of a policy gradient from the parts of one rollout, and verl's proxies of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.kernels.token_logps import Head, TokenSets, chunk_of, in_chunks, spans_of, tempered
from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS
from lit_rlkv.rng import stream

CHUNK = 2**24
"""Coordinates per draw of buckets: 128 MiB."""


class CountSketch:
    """Adds each coordinate, with a random sign, to a random bucket (Charikar et al., 2002; arXiv:0902.2206).

    The sketch is linear, and ‖sketch(x)‖² has expectation ‖x‖² over the draws, with a relative standard
    deviation of at most √(2 / size). Buckets and signs follow from the seed and a name, and are drawn again
    on each use, because they take more memory than the vector.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.seed = seed

    def __call__(self, name: str, values: Float[Tensor, " coordinate"]) -> Float[Tensor, " bucket"]:
        """Return the sketch of the vector of this name; sketches of different names may be added."""
        generator = stream(self.seed, "sketch", name, device=values.device)
        buckets = values.new_zeros(self.size)
        for chunk in torch.split(values, CHUNK):
            drawn = torch.randint(2 * self.size, chunk.shape, generator=generator, device=values.device)
            buckets.index_add_(0, drawn >> 1, torch.where(drawn & 1 == 0, chunk, -chunk))
        return buckets


Blocks = Literal["layer", "module", "all"]
"""Groupings of parameters: by decoder layer, by kind of module, or all in one block."""


def block_of(parameter: str, by: Blocks) -> str:
    """Return the block of a parameter.

    By layer: `layer_3`, or `rest` outside the decoder layers. By module: `q_proj.A` for an adapter's matrix,
    `q_proj` for a weight that is trained directly.
    """
    path = parameter.split(".")
    if by == "layer":
        return next((f"layer_{name}" for name in path if name.isdigit()), "rest")
    if by == "module":
        lora = next((i for i, name in enumerate(path) if name.startswith("lora_")), None)
        return path[-2] if lora is None else f"{path[lora - 1]}.{path[lora].removeprefix('lora_')}"
    return "all"


@dataclass(frozen=True)
class Spread:
    """Mean and variance of a gradient per block of parameters; sums over blocks are of the full gradient.

    The prompts of a rollout are independent, and Σ is the covariance of the gradient of one prompt's group of
    responses, for a fixed policy. N is the number of prompts.
    """

    blocks: tuple[str, ...]
    square: Float[Tensor, " block"]
    """‖ḡ‖² of the rollout's gradient, the mean over its prompts; its expectation is ‖G‖² + tr Σ / N."""
    per_prompt: Float[Tensor, " block"]
    """tr Σ, unbiased."""
    contrast_std: float
    """Standard deviation of the K − 1 estimates of tr Σ; NaN if there is only one."""
    n_prompts: int
    n_parts: int

    @property
    def variance(self) -> Float[Tensor, " block"]:
        """tr Σ / N, the variance of the rollout's gradient, unbiased."""
        return self.per_prompt / self.n_prompts

    @property
    def signal(self) -> Float[Tensor, " block"]:
        """‖G‖² of the expected gradient, unbiased, so it may be negative if the noise is large."""
        return self.square - self.variance

    @property
    def variance_se(self) -> float:
        """Standard error of the total variance."""
        return self.contrast_std / (self.n_parts - 1) ** 0.5 / self.n_prompts

    def scalars(self, prefix: str) -> dict[str, float]:
        """Return the metrics of the full gradient and of each block, without ratios to a variance of 0."""
        variance, signal = float(self.variance.sum()), float(self.signal.sum())
        found = {f"{prefix}/signal": signal, **_noise(prefix, variance, signal)}
        if not isnan(self.contrast_std):
            found[f"{prefix}/variance_se"] = self.variance_se
        if variance > 0 and signal != 0:
            found[f"{prefix}/noise_scale"] = self.n_prompts * variance / signal
        if len(self.blocks) > 1:
            columns = self.blocks, self.variance.tolist(), self.signal.tolist()
            for block, its_variance, its_signal in zip(*columns, strict=True):
                found |= _noise(f"{prefix}/{block}", its_variance, its_signal)
        return found


def _noise(prefix: str, variance: float, signal: float) -> dict[str, float]:
    ratio = {f"{prefix}/snr": signal / variance} if variance > 0 else {}
    return {f"{prefix}/variance": variance, **ratio}


class _Contrast(NamedTuple):
    """Deviation of one part from the ratio of the parts before it."""

    square: Tensor
    n_prompts: int
    share: float
    n_before: int

    def per_prompt(self, n_per_share: float) -> Tensor:
        """Estimate tr Σ: the part varies by n·Σ, and share times that ratio by share²·Σ / n_before."""
        share = self.share * n_per_share
        return self.square * n_per_share**2 / (self.n_prompts + share**2 / self.n_before)


@dataclass
class PartGradients:
    """Takes the gradients of a rollout's parts one at a time; holds two vectors of their length.

    The gradient of a rollout is a ratio: a sum over prompts, divided by a denominator that also depends on
    the samples, such as a number of tokens. Part k, of n_k prompts, has g_k of the gradient and s_k of the
    denominator. With N = Σ n_k, S = Σ s_k and ḡ = Σ g_k / S, the linearised ratio estimator (Cochran,
    Sampling Techniques, ch. 6) uses the scatter of the residuals,

        tr Σ / N = 1 / (K − 1) · Σ (N / n_k) · ‖(g_k − s_k·ḡ) / S‖²

    If shares are proportional to prompts, this is Σ n_k‖g_k / s_k − ḡ‖² / (K − 1) / N, which is unbiased;
    else its bias is of second order in the scatter of the shares. Each part against the parts before it is
    an estimate too, and the scatter of these estimates gives the standard error.

    The sum is kept about the ratio m of the parts so far, which avoids cancellation. With several processes
    each adds its own parts, and `spread` covers all of them.
    """

    mean: dict[str, Tensor] = field(default_factory=dict)
    """m = Σ g_k / Σ s_k."""
    leaning: dict[str, Tensor] = field(default_factory=dict)
    """Σ s_k / n_k · (g_k − s_k·m), the derivative of `scatter` by m; 0 if shares are as the prompts."""
    scatter: Float[Tensor, " block"] | None = None
    """Σ ‖g_k − s_k·m‖² / n_k, in float64."""
    share: float = 0.0
    square_share: float = 0.0
    """Σ s_k² / n_k."""
    n_prompts: int = 0
    n_parts: int = 0
    contrasts: list[_Contrast] = field(default_factory=list)

    def add(self, gradient: Mapping[str, Tensor], n_prompts: int, share: float | None = None) -> None:
        """Add one part; a part without prompts only sets the sizes of the vectors.

        Args:
            gradient: a vector for each block, under the denominator of the whole rollout.
            share: share of that denominator, in a unit common to all parts; above 0 if there are prompts.
                None: the gradient is a mean over these prompts alone.
        """
        if self.scatter is None:
            self.mean = {block: torch.zeros_like(vector) for block, vector in gradient.items()}
            self.leaning = dict(self.mean)
            self.scatter = torch.stack([square_of(vector) for vector in self.mean.values()])
        if n_prompts == 0:
            return
        scale, share = (n_prompts, float(n_prompts)) if share is None else (1, share)
        total = self.share + share
        turn = (share / n_prompts * self.share - self.square_share) / total
        squares, products = [], []
        for block, vector in gradient.items():
            difference = scale * vector - share * self.mean[block]
            squares.append(square_of(difference))
            products.append(torch.dot(difference, self.leaning[block]).double())
            self.mean[block] = self.mean[block] + difference / total
            self.leaning[block] = self.leaning[block] + turn * difference
        square = torch.stack(squares)
        widened = square * (self.square_share + self.share**2 / n_prompts) / total**2
        self.scatter = self.scatter + widened - 2 / total * torch.stack(products)
        if self.n_prompts > 0:
            self.contrasts.append(_Contrast(square.sum(), n_prompts, share, self.n_prompts))
        self.share, self.square_share = total, self.square_share + share**2 / n_prompts
        self.n_prompts, self.n_parts = self.n_prompts + n_prompts, self.n_parts + 1

    def spread(self) -> Spread | None:
        """Return the estimate from all parts of all processes; None if fewer than two parts count."""
        assert self.scatter is not None, "a rollout has parts"
        sizes = self.scatter.new_tensor([self.n_prompts, self.n_parts, self.share])
        n_prompts, n_parts, share = over_ranks(sizes).tolist()
        if n_parts < 2:
            return None
        mean = {block: over_ranks(vector * self.share) / share for block, vector in self.mean.items()}
        n_per_share = n_prompts / share
        scatter = over_ranks(self._scatter_about(mean)).cpu()
        contrasts = [contrast.per_prompt(n_per_share) for contrast in self.contrasts]
        return Spread(
            blocks=tuple(mean),
            square=torch.stack([square_of(vector) for vector in mean.values()]).cpu(),
            per_prompt=scatter * n_per_share**2 / (n_parts - 1),
            contrast_std=_std(torch.stack(contrasts) if contrasts else self.scatter.new_zeros(0)),
            n_prompts=int(n_prompts),
            n_parts=int(n_parts),
        )

    def _scatter_about(self, mean: Mapping[str, Tensor]) -> Float[Tensor, " block"]:
        """Return `scatter` about another ratio than that of this process's parts."""
        assert self.scatter is not None
        moves = {block: vector - self.mean[block] for block, vector in mean.items()}
        squares = torch.stack([square_of(move) for move in moves.values()])
        products = torch.stack([torch.dot(move, self.leaning[b]).double() for b, move in moves.items()])
        return self.scatter + self.square_share * squares - 2 * products


def square_of(vector: Float[Tensor, " coordinate"]) -> Float[Tensor, ""]:
    """Return ‖vector‖² in float64, without a copy of the vector."""
    return torch.linalg.vector_norm(vector).double().square()


def _std(values: Float[Tensor, " contrast"]) -> float:
    """Return the standard deviation over all processes; NaN for fewer than two values."""
    sums = torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])
    n, total, squares = over_ranks(sums).tolist()
    return max(squares - total**2 / n, 0.0) ** 0.5 / (n - 1) ** 0.5 if n > 1 else nan


@torch.no_grad()
def squared_probs(
    hidden: Float[Tensor, "token dim"],
    head: Head,
    temperature: float,
    vocab_size: int,
    sets: TokenSets | None = None,
) -> Float[Tensor, " token"]:
    """Return Σ_v π_v² = exp(logsumexp(2z) − 2·logsumexp(z)) at each position, z the logits / temperature.

    Logits are computed in chunks.

    Args:
        sets: renormalise each distribution over its set; see `token_logps`.
    """

    def chunk_squares(rows: Tensor, *spans: Tensor) -> tuple[Tensor]:
        logits = head(rows)
        logits = tempered(chunk_of(sets, spans, logits).logits(logits), temperature)
        return (((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp(),)

    size = max(MAX_CHUNK_LOGITS // vocab_size, 1)
    (squares,) = in_chunks(chunk_squares, hidden, *spans_of(sets), size=size, stores_gradients=False)
    return squares


def proxy_sums(
    logps: Float[Tensor, "batch seq"],
    squares: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    weights: Float[Tensor, "batch seq"],
    is_counted: Bool[Tensor, "batch seq"],
) -> Float[Tensor, " sum"]:
    """Return sums over responses: their number, A², W and w̄²·A²·max(W_on, 0); see `variance_proxy`.

    Args:
        squares: Σ_v π_v² at each response token.
        weights: weights of the off-policy correction.
        is_counted: True on tokens that the policy's loss counts; a response without such tokens has
            A = W = 0.
    """
    energy = 1 - 2 * logps.exp() + squares
    n = is_counted.sum(dim=1).clamp(min=1)

    def total(values: Tensor) -> Tensor:
        return values.masked_fill(~is_counted, 0.0).sum(dim=1)

    advantage, weight = total(advantages) / n, total(weights) / n
    on_policy = total(energy * (weights != 0)).clamp(min=0)
    sums = (
        torch.ones_like(advantage),
        advantage.square(),
        total(energy * weights.square()),
        weight.square() * advantage.square() * on_policy,
    )
    return torch.stack(sums).sum(dim=1)


def variance_proxy(sums: Float[Tensor, " sum"], square: float | None) -> dict[str, float]:
    """Return verl's `variance_proxy/*` (arXiv:2602.07078) from the sums over the N responses of all ranks.

    W = Σ_t w_t²·(1 − 2π_t + Σ_v π_v²) is the squared gradient of a response's log-prob with respect to the
    logits, A its mean advantage. expected_w = E[W], expected_a_squared = E[A²], proxy2_total_power =
    E[w̄²·A²·W_on], where W_on has no weights but leaves out what weighs 0, proxy1_signal_strength = ‖ḡ‖² and
    proxy3_pure_noise = max(proxy2 − proxy1, 0) / (N − 1).

    Power and signal are of different gradients, with respect to the logits and to the parameters. That is
    verl's formula, useful for a trend within one run; `PartGradients` estimates the variance itself.

    Args:
        square: ‖ḡ‖² of the rollout's policy gradient, for which verl takes the norm of its updates; None if
            only some parameters were measured, which leaves out proxies 1 and 3.
    """
    n, a_squared, w, power = over_ranks(sums.double()).tolist()
    found = {
        "variance_proxy/proxy2_total_power": power / n,
        "variance_proxy/expected_a_squared": a_squared / n,
        "variance_proxy/expected_w": w / n,
    }
    if square is not None:
        found["variance_proxy/proxy1_signal_strength"] = square
        found["variance_proxy/proxy3_pure_noise"] = max(power / n - square, 0.0) / max(n - 1, 1)
    return found
