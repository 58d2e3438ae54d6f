"""Long vectors as a few buckets that keep their lengths and sums: CountSketch."""

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.checks import is_count
from lit_rlkv.rng import stream

CHUNK = 2**24
"""Coordinates whose buckets are drawn at a time: 128 MiB."""


class CountSketch:
    """Adds each coordinate, with a random sign, to a random bucket (Charikar et al., 2002; arXiv:0902.2206).

    The sketch is linear, and ‖sketch(x)‖² has expectation ‖x‖² over the draws, with a relative standard
    deviation of at most √(2 / size). Buckets and signs follow from the seed and a name, and are drawn anew
    whenever they are needed: held, they would take more memory than the vector.

    Raises:
        ValueError: `size` is no number of buckets.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        if not is_count(size):
            raise ValueError(f"a sketch of size={size} holds nothing; give a whole number of at least 1")
        self.size = size
        self.seed = seed

    def __call__(self, name: str, values: Float[Tensor, " coordinate"]) -> Float[Tensor, " bucket"]:
        """The sketch of the vector of this name; vectors of different names may be added up."""
        generator = stream(self.seed, "sketch", name, device=values.device)
        buckets = values.new_zeros(self.size)
        for chunk in torch.split(values, CHUNK):
            drawn = torch.randint(2 * self.size, chunk.shape, generator=generator, device=values.device)
            buckets.index_add_(0, drawn >> 1, torch.where(drawn & 1 == 0, chunk, -chunk))
        return buckets
