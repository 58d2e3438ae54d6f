"""Seconds of calls on a GPU or a CPU, in turns, and what the machine gives at most."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Device = torch.device | str

N_WARM_UP = 2
"""Rounds whose times are dropped."""
FLUSH_BYTES, N_FLUSHES = 2**29, 4
"""Written before each timed call on CUDA, and then read once: more than any L2 holds, so that inputs come
from memory, and long enough for the host to be ahead of the device, so that what it takes to launch is not
timed. The reading leaves lines in the L2 that need not be written back within the timed call."""
CPU_COPY_BYTES, CUDA_COPY_BYTES = 2**26, 2**31
CPU_MATMUL, CUDA_MATMUL = 768, 8192
CEILING_ROUNDS = 20


@dataclass(frozen=True)
class Spread:
    """Spread of measurements of one quantity, in its unit."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Ceilings:
    """Speed of copies and matrix products on this machine, measured in the same run."""

    copy_gb_per_s: float
    """10⁹ bytes read and written."""
    matmul_tflops: float
    """Flops per second of bfloat16 on CUDA, of float32 on a CPU."""


def spread(values: Sequence[float]) -> Spread:
    """Quantiles between the two nearest measurements."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[0], tenths[-1])


def taking_turns(
    calls: Mapping[str, Call],
    device: Device,
    n_rounds: int,
    *,
    prepare: Call | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of several calls, one after the other in every round: what slows one slows all.

    On CUDA these are the device's, from events; a call that waits for the device counts the host's part too.

    Args:
        n_rounds: rounds that count, after some that warm up.
        prepare: restores what a call changes, before each call and not timed.
    """
    measure = _cuda_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    times = measure(calls, N_WARM_UP + n_rounds, prepare)
    return {name: values[N_WARM_UP:] for name, values in times.items()}


def first_seconds(call: Call, device: Device) -> float:
    """Wall-clock seconds of one call with all that it has to wait for: compilation, when it is the first."""
    synchronize(device)
    started_at = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started_at


def synchronize(device: Device) -> None:
    """Wait until the device has nothing left to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def is_device_lost() -> bool:
    """True if nothing can run on the GPU any more in this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def ceilings(device: Device) -> Ceilings:
    """Copy of buffers far larger than a cache, and a square product of random numbers."""
    is_cuda = torch.device(device).type == "cuda"
    source = torch.ones(CUDA_COPY_BYTES if is_cuda else CPU_COPY_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source), device)
    size = CUDA_MATMUL if is_cuda else CPU_MATMUL
    dtype = torch.bfloat16 if is_cuda else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    matmul_s = _median_seconds(lambda: torch.mm(left, right, out=product), device)
    return Ceilings(2 * source.numel() / copy_s / 1e9, 2 * size**3 / matmul_s / 1e12)


def _median_seconds(call: Call, device: Device) -> float:
    return statistics.median(taking_turns({"call": call}, device, CEILING_ROUNDS)["call"])


def _cpu_seconds(calls: Mapping[str, Call], n_rounds: int, prepare: Call | None) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n_rounds):
        for name, call in calls.items():
            if prepare is not None:
                prepare()
            started_at = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started_at)
    return times


def _cuda_seconds(calls: Mapping[str, Call], n_rounds: int, prepare: Call | None) -> dict[str, list[float]]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(n_rounds):
        for name, call in calls.items():
            if prepare is not None:
                prepare()
            for value in range(N_FLUSHES):
                flush.fill_(value)
            flush.view(torch.int64).amax()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()  # only now, so that the host stays ahead
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs] for name, pairs in events.items()}
