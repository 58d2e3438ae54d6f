"""Tile sizes of shadow attention, by element size, head dimension and device.

Fixed and not tuned at run time, so that results do not depend on a measurement. On devices with as much
shared memory as Hopper's the sizes for up to 128 dimensions are those that torch has settled on there for its
FlexAttention; the others follow from the compiler's report: nothing spilled in inner loops, and no more taken
than a device has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rlkv.kernels.device import describe

LARGE_SHARED_BYTES = 220 * 1024
"""Shared memory of a multiprocessor: 228 KiB on an H100, 164 on an A100, 100 on desktop cards."""


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and of keys per step, warps per program, and steps that loads run ahead, plus one."""

    queries: int
    keys: int
    n_warps: int
    n_stages: int


@dataclass(frozen=True)
class TilesOfPasses:
    """Tiles of the forward pass, and of the two that the backward pass consists of."""

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
FLOAT32 = {  # without tensor cores, whose products are not float32's
    64: TilesOfPasses(*[Tiles(32, 32, 4, 2)] * 3),
    128: TilesOfPasses(*[Tiles(16, 16, 4, 2)] * 3),
    256: TilesOfPasses(*[Tiles(16, 16, 4, 2)] * 3),
}
MAX_HEAD_DIM = max(LARGE)


def tiles_for(like: Tensor, width: int) -> TilesOfPasses:
    """Return the tile sizes for tensors of this kind whose wider head dimension, padded, is `width`.

    Raises:
        ValueError: heads wider than `MAX_HEAD_DIM`.
    """
    if width > MAX_HEAD_DIM:
        raise ValueError(
            f"heads of more than {MAX_HEAD_DIM} dimensions do not fit; use kernels=auto or kernels=reference"
        )
    is_large = describe(like.device).shared_bytes >= LARGE_SHARED_BYTES
    sizes = FLOAT32 if like.dtype == torch.float32 else LARGE if is_large else SMALL
    return sizes[max(64, width)]
