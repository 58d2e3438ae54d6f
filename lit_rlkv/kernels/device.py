"""The device that kernels are cut for: no timing moves a result, but the sizes of the hardware may."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """What decides how a launch is cut."""

    n_multiprocessors: int
    shared_bytes: int
    """Of a multiprocessor."""

    @property
    def program_bytes(self) -> int:
        """The most shared memory of one program: CUDA keeps 1 KiB of each for itself."""
        return self.shared_bytes - 1024


A100 = Device(108, 167_936)
L40S = Device(142, 102_400)
H100 = Device(132, 233_472)

_assumed = H100


def describe(device: torch.device) -> Device:
    """The sizes of a GPU, which torch remembers, so that nothing waits; of an H100 where there is none."""
    if device.type != "cuda":
        return _assumed
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


@contextmanager
def assuming(device: Device) -> Iterator[None]:
    """Within the block, what is not on a GPU is cut for this one: to compile for it without having it."""
    global _assumed
    before = _assumed
    _assumed = device
    try:
        yield
    finally:
        _assumed = before
