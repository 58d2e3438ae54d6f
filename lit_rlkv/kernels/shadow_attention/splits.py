"""Number of programs that share the query heads of a group when dK and dV are computed.

A model of waves, from shapes and the device alone: no timing changes a result.
"""

from lit_rlkv.kernels.device import Device
from lit_rlkv.kernels.shadow_attention.tiles import Tiles

REGISTERS = 65_536
"""Registers of a multiprocessor, of every generation since Kepler."""
REGISTERS_OF_THREAD = 256
"""Most registers of a thread. In 16 bit the kernel of dK and dV takes 199 to 255, in float32 128 to 224."""
RESERVED_BYTES = 1024
"""Shared memory of a program that CUDA reserves for itself."""


def programs_per_multiprocessor(tiles: Tiles, row_bytes: int, device: Device) -> int:
    """Return the programs of dK and dV that a multiprocessor can run at the same time.

    Args:
        row_bytes: bytes of one key and one value, padded to the tile's width.
    """
    tile_bytes = (tiles.keys + tiles.n_stages * tiles.queries) * row_bytes + RESERVED_BYTES
    by_registers = REGISTERS // (REGISTERS_OF_THREAD * 32 * tiles.n_warps)
    return max(1, min(by_registers, device.shared_bytes // tile_bytes))


def choose_n_splits(group: int, n_programs: int, n_at_once: int, work: float, merge: float) -> int:
    """Return the number of splits with the lowest cost, the fewest of equals.

    cost(n) = waves(n) · work / n + (n > 1) · n · merge,  waves(n) = ⌈n · n_programs / n_at_once⌉

    Args:
        group: query heads to share; every split has equally many of them.
        n_programs: programs without a split.
        n_at_once: programs that run at the same time.
        work: time of a program with all heads of a group.
        merge: time to write and sum one split's gradients, in the same unit.
    """

    def cost(n: int) -> float:
        return -(-n * n_programs // n_at_once) * work / n + (n * merge if n > 1 else 0.0)

    return min((n for n in range(1, group + 1) if group % n == 0), key=cost)
