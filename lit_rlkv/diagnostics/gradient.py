"""How much the gradient of a rollout varies from rollout to rollout, seen from parts of a single one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

BLOCKS = ("layer", "module", "all")
"""What parameters are counted together: decoder layers, kinds of module, or all of them."""


def block_of(parameter: str, by: str) -> str:
    """The block that a parameter of this name is counted in.

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
    """The names in which the regular expression `only` is found; all of them if it is None.

    Raises:
        ValueError: none is left.
    """
    found = [name for name in names if only is None or re.search(only, name)]
    if not found:
        raise ValueError(
            f"only={only!r} is found in none of the {len(names)} names of what the policy trains, such as "
            f"{names[0]}; give another regular expression, or null for all"
        )
    return found


@dataclass(frozen=True)
class Spread:
    """Mean and covariance of a gradient; block by block, whose sum is the whole.

    The prompts of a rollout are independent, and Σ is the covariance of the gradient of one prompt's group of
    responses; N prompts are counted. What is random is the prompts and their responses; the policy is fixed.
    """

    blocks: tuple[str, ...]
    square: Float[Tensor, " block"]
    """‖ḡ‖² of the rollout's gradient, the mean over its prompts. Its expectation is ‖G‖² + tr Σ / N."""
    per_prompt: Float[Tensor, " block"]
    """tr Σ, unbiased."""
    contrast_std: float
    """Standard deviation of the estimates of tr Σ whose mean the total is; NaN for a single one."""
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
        """Metrics of the whole and of each block; ratios to a variance of 0 are left out."""
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


@dataclass
class PartGradients:
    """Takes the gradients of a rollout's parts one at a time; holds their mean and no other of them.

    Part k is the mean over n_k prompts, so that its covariance is Σ / n_k. Of its difference to the mean of
    the parts before it, which has N = n_1 + ... + n_{k−1} prompts and is independent of it,

        q_k = n_k·N / (n_k + N) · ‖g_k − ḡ_{k−1}‖²

    has expectation tr Σ, whatever the sizes. The estimate of tr Σ is the mean of the K − 1 such contrasts,
    which is Σ n_k‖g_k − ḡ‖² / (K − 1) (Welford's recurrence), and their scatter says how good it is.

    Where processes train together, each adds its own parts, and `spread` is that of them all.
    """

    mean: dict[str, Tensor] = field(default_factory=dict)
    n_prompts: int = 0
    n_parts: int = 0
    contrasts: list[Tensor] = field(default_factory=list)

    def add(self, gradient: Mapping[str, Tensor], n_prompts: int) -> None:
        """One more part: a vector for each block, and how many prompts it is the mean of.

        A part of no prompts says nothing, and only tells how long the vectors are.
        """
        if not self.mean:
            self.mean = {block: torch.zeros_like(vector) for block, vector in gradient.items()}
        if n_prompts == 0:
            return
        before, self.n_prompts = self.n_prompts, self.n_prompts + n_prompts
        self.n_parts += 1
        squares = []
        for block, vector in gradient.items():
            difference = vector - self.mean[block]
            self.mean[block] = self.mean[block] + difference * (n_prompts / self.n_prompts)
            squares.append(square_of(difference))
        if before > 0:
            self.contrasts.append(torch.stack(squares) * (n_prompts * before / self.n_prompts))

    def spread(self) -> Spread | None:
        """What all parts, of all processes, say; None where fewer than two of them count."""
        device = next(iter(self.mean.values())).device
        sizes = over_ranks(torch.tensor([self.n_prompts, self.n_parts], device=device))
        n_prompts, n_parts = (int(size) for size in sizes)
        if n_parts < 2:
            return None
        mean = {block: over_ranks(vector * self.n_prompts) / n_prompts for block, vector in self.mean.items()}
        between = torch.stack([square_of(self.mean[block] - mean[block]) for block in mean]) * self.n_prompts
        contrasts = torch.stack([torch.zeros_like(between), *self.contrasts])
        sums = over_ranks(between + contrasts.sum(dim=0)).double().cpu()
        return Spread(
            blocks=tuple(mean),
            square=torch.stack([square_of(vector) for vector in mean.values()]).double().cpu(),
            per_prompt=sums / (n_parts - 1),
            contrast_std=_std(contrasts[1:].sum(dim=1).double()),
            n_prompts=n_prompts,
            n_parts=n_parts,
        )


def square_of(vector: Float[Tensor, " coordinate"]) -> Float[Tensor, ""]:
    """‖vector‖², without another vector of that length."""
    return torch.linalg.vector_norm(vector).square()


def over_ranks(values: Tensor) -> Tensor:
    """The sum over all processes that train together."""
    if dist.is_available() and dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def _std(values: Float[Tensor, " contrast"]) -> float:
    """Of the numbers of all processes; NaN for fewer than two."""
    sums = torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])
    n, total, squares = over_ranks(sums).tolist()
    return max(squares - total**2 / n, 0.0) ** 0.5 / (n - 1) ** 0.5 if n > 1 else nan
