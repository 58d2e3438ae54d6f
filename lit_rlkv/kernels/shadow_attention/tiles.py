"""Tile sizes of shadow attention, by element size, head dimension and device.

Sizes are fixed, so that results do not depend on timings. For up to 128 dimensions on devices with as much
shared memory as Hopper's, they are torch's sizes for FlexAttention. The others follow from compiler reports:
no spills in inner loops, and no more shared memory than the device has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rlkv.kernels.device import device_info

LARGE_SHARED_BYTES = 220 * 1024
"""Shared memory of a multiprocessor: 228 KiB on an H100, 164 on an A100, 100 on desktop cards."""


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per step, warps per program, and pipeline stages."""

    queries: int
    keys: int
    n_warps: int
    n_stages: int


@dataclass(frozen=True)
class TilesOfPasses:
    """Tiles of the forward pass and of the two backward passes."""

    forward: Tiles
    query_gradients: Tiles
    key_gradients: Tiles


LARGE = {
    64: TilesOfPasses(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    128: TilesOfPasses(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    256: TilesOfPasses(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
}
SMALL = {
    64: TilesOfPasses(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: TilesOfPasses(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 64, 8, 2)),
    256: TilesOfPasses(Tiles(64, 32, 4, 2), Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2)),
}
FLOAT32 = {  # without tensor cores, whose products are not exact in float32
    64: TilesOfPasses(*[Tiles(32, 32, 4, 2)] * 3),
    128: TilesOfPasses(*[Tiles(16, 16, 4, 2)] * 3),
    256: TilesOfPasses(*[Tiles(16, 16, 4, 2)] * 3),
}
MAX_HEAD_DIM = max(LARGE)


def tiles_for(tensor: Tensor, width: int) -> TilesOfPasses:
    """Return the tile sizes for tensors of this kind whose wider head dimension, padded, is `width`.

    Raises:
        ValueError: heads wider than `MAX_HEAD_DIM`.
    """
    if width > MAX_HEAD_DIM:
        raise ValueError(
            f"heads of more than {MAX_HEAD_DIM} dimensions do not fit; use kernels=auto or kernels=reference"
        )
    is_large = device_info(tensor.device).shared_bytes >= LARGE_SHARED_BYTES
    sizes = FLOAT32 if tensor.dtype == torch.float32 else LARGE if is_large else SMALL
    return sizes[max(64, width)]
