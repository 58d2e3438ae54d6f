"""Hardware sizes from which launches are planned, so that no timing can change a result."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """Hardware sizes of a GPU."""

    n_multiprocessors: int
    shared_bytes: int
    """Shared memory of one multiprocessor."""

    @property
    def program_bytes(self) -> int:
        """Return the most shared memory of one program; CUDA reserves 1 KiB for itself."""
        return self.shared_bytes - 1024


A100 = Device(108, 167_936)
L40S = Device(142, 102_400)
H100 = Device(132, 233_472)

_assumed = H100


def device_info(device: torch.device) -> Device:
    """Return the sizes of a GPU, or of an H100 for any other device. Does not wait for the device."""
    if device.type != "cuda":
        return _assumed
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


@contextmanager
def assume_device(device: Device) -> Iterator[None]:
    """Within the block, plan launches for this GPU where there is none, to compile without it."""
    global _assumed
    before = _assumed
    _assumed = device
    try:
        yield
    finally:
        _assumed = before
