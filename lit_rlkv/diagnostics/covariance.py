"""Covariance of a policy gradient from the parts of one rollout, with whole or sketched vectors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.checks import is_count
from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.rng import stream

CHUNK = 2**24
"""Coordinates per draw of buckets: 128 MiB."""


class CountSketch:
    """Adds each coordinate, with a random sign, to a random bucket (Charikar et al., 2002; arXiv:0902.2206).

    The sketch is linear, and ‖sketch(x)‖² has expectation ‖x‖² over the draws, with a relative standard
    deviation of at most √(2 / size). Buckets and signs follow from the seed and a name, and are drawn anew
    whenever they are needed: held, they would take more memory than the vector.

    Raises:
        ValueError: `size` is not a positive whole number.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        if not is_count(size):
            raise ValueError(f"a sketch of size={size} holds nothing; give a whole number of at least 1")
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


BLOCKS = ("layer", "module", "all")
"""Groupings of parameters: by decoder layer, by kind of module, or all in one block."""


def block_of(parameter: str, by: str) -> str:
    """Return the block of a parameter.

    By layer: `layer_3`, or `rest` for what is in none of them. By module: `q_proj.A` for an adapter's matrix,
    `q_proj` for a weight that trains itself.
    """
    path = parameter.split(".")
    if by == "layer":
        return next((f"layer_{name}" for name in path if name.isdigit()), "rest")
    if by == "module":
        lora = next((i for i, name in enumerate(path) if name.startswith("lora_")), None)
        return path[-2] if lora is None else f"{path[lora - 1]}.{path[lora].removeprefix('lora_')}"
    return "all"


def chosen(names: list[str], only: str | None) -> list[str]:
    """Return the names that match the regular expression `only`; all of them if it is None.

    Raises:
        ValueError: none is left.
    """
    found = [name for name in names if only is None or re.search(only, name)]
    if not found:
        raise ValueError(
            f"only={only!r} matches none of the {len(names)} names of what the policy trains, such as "
            f"{names[0]}; give another regular expression, or null for all"
        )
    return found


@dataclass(frozen=True)
class Spread:
    """Mean and covariance of a gradient per block of parameters; the blocks add up to the whole.

    The prompts of a rollout are independent, and Σ is the covariance of the gradient of one prompt's group of
    responses; N prompts are counted. What is random is the prompts and their responses; the policy is fixed.
    """

    blocks: tuple[str, ...]
    square: Float[Tensor, " block"]
    """‖ḡ‖² of the rollout's gradient, the mean over its prompts. Its expectation is ‖G‖² + tr Σ / N."""
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
        """‖G‖² of the expected gradient, unbiased, so that it may be negative where noise hides it."""
        return self.square - self.variance

    @property
    def variance_se(self) -> float:
        """Standard error of the total variance."""
        return self.contrast_std / (self.n_parts - 1) ** 0.5 / self.n_prompts

    def scalars(self, prefix: str) -> dict[str, float]:
        """Return the metrics of the whole and of each block, without ratios to a variance of 0."""
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


@dataclass(frozen=True)
class _Contrast:
    """Deviation of one part from the ratio of the parts before it."""

    square: Tensor
    n_prompts: int
    share: float
    n_before: int

    def per_prompt(self, n_per_share: float) -> Tensor:
        """An estimate of tr Σ: the part varies by n·Σ, and share times that ratio by share²·Σ / n_before."""
        share = self.share * n_per_share
        return self.square * n_per_share**2 / (self.n_prompts + share**2 / self.n_before)


@dataclass
class PartGradients:
    """Takes the gradients of a rollout's parts one at a time; holds two vectors of their length.

    The gradient of a rollout is a ratio: a sum over prompts, over a denominator that depends on what was
    sampled too, such as a number of tokens. Part k, of n_k prompts, brings g_k of the gradient and s_k of
    the denominator. With N = Σ n_k, S = Σ s_k and ḡ = Σ g_k / S, the linearised ratio estimator (Cochran,
    Sampling Techniques, ch. 6) takes the scatter of what is left of g_k,

        tr Σ / N = 1 / (K − 1) · Σ (N / n_k) · ‖(g_k − s_k·ḡ) / S‖²

    Where the shares are as the prompts this is Σ n_k‖g_k / s_k − ḡ‖² / (K − 1) / N without any bias; else
    its bias is of second order in how the shares scatter. Each part against those before it is an estimate
    of its own, and the scatter of these says how good the whole is.

    The sum is kept about the ratio m of the parts so far and moved along with it, which avoids
    cancellation. With several processes each adds its own parts, and `spread` covers all of them.
    """

    mean: dict[str, Tensor] = field(default_factory=dict)
    """m = Σ g_k / Σ s_k."""
    leaning: dict[str, Tensor] = field(default_factory=dict)
    """Σ s_k / n_k · (g_k − s_k·m): how `scatter` changes with m. 0 where the shares are as the prompts."""
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
            share: of that denominator, in any unit that the parts have in common; above 0 where prompts
                count. None: the gradient is a mean over these prompts alone.
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
            products.append(_product(difference, self.leaning[block]))
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
        moves = [(vector - self.mean[block], self.leaning[block]) for block, vector in mean.items()]
        squares = torch.stack([square_of(move) for move, _ in moves])
        products = torch.stack([_product(move, leaning) for move, leaning in moves])
        return self.scatter + self.square_share * squares - 2 * products


def square_of(vector: Float[Tensor, " coordinate"]) -> Float[Tensor, ""]:
    """Return ‖vector‖² in float64, without a copy of the vector."""
    return torch.linalg.vector_norm(vector).double().square()


def _product(vector: Float[Tensor, " coordinate"], other: Float[Tensor, " coordinate"]) -> Float[Tensor, ""]:
    return torch.dot(vector, other).double()


def _std(values: Float[Tensor, " contrast"]) -> float:
    """Return the standard deviation over all processes; NaN for fewer than two values."""
    sums = torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])
    n, total, squares = over_ranks(sums).tolist()
    return max(squares - total**2 / n, 0.0) ** 0.5 / (n - 1) ** 0.5 if n > 1 else nan
