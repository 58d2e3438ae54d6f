"""Bytes held now, and at most since a moment: by torch on a CUDA device, elsewhere by the process."""

from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What to write into the second file, so that the peak starts anew from what is resident now (proc(5))."""


class Meter:
    """Reads what torch has allocated on a CUDA device; elsewhere, on Linux, the resident set of the process.

    The peak of a resident set is the kernel's, and begins anew at `reset_peak`; what `getrusage` and `time`
    say of the process then begins anew too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._knows_peak = False

    def wait(self) -> None:
        """Until the device has done all that it was asked to."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Count the peak from here."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._knows_peak = True
        except OSError:  # not Linux, or not allowed: the peak of all time is not that of a phase
            self._knows_peak = False

    def read(self) -> dict[str, int]:
        """Bytes by what they are; without what cannot be known here."""
        if self.is_cuda:
            return {
                "allocated": torch.cuda.memory_allocated(self.device),
                "peak": torch.cuda.max_memory_allocated(self.device),
            }
        status = _status()
        fields = {"resident": "VmRSS"} | ({"resident_peak": "VmHWM"} if self._knows_peak else {})
        return {name: status[field] for name, field in fields.items() if field in status}


def _status() -> dict[str, int]:
    """The sizes that the kernel gives for this process, in bytes; none where there is no such page."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if field[-1:] == ["kB"]}
