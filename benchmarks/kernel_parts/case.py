"""One operation at one size: ways to compute it, proven right and then timed in turns."""

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

import record
import torch
from kernel_parts.accuracy import WrongKernelError
from kernel_parts.counts import Work
from kernel_parts.timing import (
    Call,
    Ceilings,
    Spread,
    first_seconds,
    is_device_lost,
    spread,
    taking_turns,
)
from live_bytes import CudaBytes, LiveBytes, Meter
from time_limit import TimeLimit
from torch import Tensor

from lit_rlkv.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class Setting:
    """Settings that all cases of a run share."""

    device: str
    is_toy: bool
    n_rounds: int
    times_flex: bool = True
    """FlexAttention is compared with, too; compiling it takes a minute for each length."""

    @property
    def dtype(self) -> torch.dtype:
        """Triton's interpreter multiplies bfloat16 wrongly, so on a CPU it is float32."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def timed_kernels(self) -> str:
        """On a CPU the Triton kernels are interpreted: checked, not timed."""
        return "triton" if self.device == "cuda" else "reference"

    def random(self, *shape: int, seed: int, requires_grad: bool = False) -> Tensor:
        """Normal numbers, the same for the same seed and device."""
        draw = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(shape, generator=draw, device=self.device, dtype=torch.float32)
        return values.to(self.dtype).requires_grad_(requires_grad)


@dataclass(frozen=True)
class Arm:
    """One way to compute."""

    name: str
    call: Call
    work: Work | None = None
    """None where no ceiling applies."""


@dataclass(frozen=True)
class Case:
    """An operation at one size."""

    op: str
    label: str
    sizes: dict[str, int | str]
    arms: tuple[Arm, ...]
    """Ours first: the others are compared with it."""
    check: Callable[[], float]
    """Largest error of our kernel in units of plain PyTorch's own; raises WrongKernelError."""
    bound: str = "copy"
    """Limit of the machine that applies: `copy` or `matmul`."""
    inputs: tuple[Tensor, ...] = ()
    """Bytes in memory before any arm runs."""
    prepare: Call | None = None
    """Restores what a call changes."""
    figures: dict[str, float] = field(default_factory=dict)
    """Facts about the case for the record, by name."""


Builder = Callable[[], Case]
"""Makes a case when its turn comes, because all of them together do not fit into memory."""
Builders = Iterator[tuple[str, Builder]]
"""Labels, and what makes the case of that name."""


@dataclass(frozen=True)
class ArmResult:
    """Measurements of one arm."""

    name: str
    seconds: Spread
    first_s: float
    """Wall-clock of the first call, with compilation."""
    peak_bytes: int
    """Most memory above the inputs during one call."""
    share_of_ceiling: float | None
    over_ours: float
    """Time over that of our kernel; above 1 is slower than ours."""
    work: Work | None = None


@dataclass(frozen=True)
class Failure:
    """An arm that could not run."""

    name: str
    reason: str
    out_of_memory: bool


@dataclass(frozen=True)
class CaseResult:
    """Measurements of a case."""

    op: str
    label: str
    sizes: dict[str, int | str]
    bound: str
    excess_error: float
    arms: tuple[ArmResult, ...]
    failed: tuple[Failure, ...]
    figures: dict[str, float]

    @property
    def in_short(self) -> str:
        """The medians alone, for whoever waits for the table."""
        medians = ", ".join(f"{arm.name} {1e3 * arm.seconds.median:.3f}" for arm in self.arms)
        return f"ms: {medians}"


@dataclass(frozen=True)
class Refusal:
    """A case without measurements: the kernel is wrong, or memory does not suffice."""

    reason: str
    out_of_memory: bool

    @property
    def in_short(self) -> str:
        return "out of memory" if self.out_of_memory else f"refused: {self.reason}"


def is_done(row: dict | None) -> bool:
    """True if a row of the record need not be measured again: all but a refused kernel's."""
    return row is not None and ("reason" not in row or row["out_of_memory"])


def measure_all(
    args: argparse.Namespace,
    name: str,
    todo: Iterable[tuple[str, dict, Builder]],
    setting: Setting,
    ceilings: Ceilings,
    row_of: Callable[[CaseResult], dict],
) -> tuple[list[CaseResult], list[str]]:
    """Measure and record what has no row yet until the time is over; a case that is refused stops no other.

    Args:
        name: of the record
        todo: title of each case, the entries by which its row is found again, and what makes it

    Returns:
        The measurements, and which cases were refused.
    """
    limit, results, refused = TimeLimit(args.minutes), [], []
    for title, key, build in todo:
        if args.record and not args.again and is_done(record.find(name, **key)):
            print(f"{title}: in the record already", flush=True)
            continue
        if limit.is_over:
            print(f"{title}: no time left; start again to go on", flush=True)
            continue
        result = try_to_measure(build, setting, ceilings)
        release(setting.device)
        print(f"{title}: {result.in_short}", flush=True)
        if isinstance(result, CaseResult):
            results.append(result)
            record.append(name, key | row_of(result))
            continue
        if not result.out_of_memory:
            refused.append(f"{title}: {result.in_short}")
        record.append(name, key | asdict(result))
    return results, refused


def try_to_measure(build: Builder, setting: Setting, ceilings: Ceilings) -> CaseResult | Refusal:
    """Return the measurements of a case, or why there are none; the other cases of a run go on.

    Raises:
        Exception: the device is lost, so that no other case could be measured.
    """
    try:
        return measure(build(), setting, ceilings)
    except Exception as error:
        if is_device_lost():
            raise
        return Refusal(reason(error), is_out_of_memory(error))


def reason(error: Exception) -> str:
    """Return the first line of an error, and its type where it is not the check's."""
    first_line = str(error).strip().partition("\n")[0][:300]
    return first_line if isinstance(error, WrongKernelError) else f"{type(error).__name__}: {first_line}"


def measure(case: Case, setting: Setting, ceilings: Ceilings) -> CaseResult:
    """First calls, then the proof, then times in turns, then memory.

    An arm that cannot run is left out; `over_ours` is the time over that of the first arm that ran.

    Raises:
        RuntimeError: no arm can run.
        WrongKernelError: the kernel's result is not the definition's.
    """
    first_s, failed = _first_calls(case, setting)
    arms = [arm for arm in case.arms if arm.name in first_s]
    if not arms:
        why = torch.OutOfMemoryError if all(failure.out_of_memory for failure in failed) else RuntimeError
        raise why(f"no way of {case.op}, {case.label} can run: {failed[0].reason}")
    error = case.check()
    times = taking_turns(
        {arm.name: arm.call for arm in arms}, setting.device, setting.n_rounds, prepare=case.prepare
    )
    seconds = {name: spread(values) for name, values in times.items()}
    ours = seconds[arms[0].name].median
    results = tuple(
        ArmResult(
            name=arm.name,
            seconds=seconds[arm.name],
            first_s=first_s[arm.name],
            peak_bytes=peak_bytes(arm.call, setting.device, case.inputs),
            share_of_ceiling=_share(arm.work, case.bound, seconds[arm.name].median, ceilings),
            over_ours=seconds[arm.name].median / ours,
            work=arm.work,
        )
        for arm in arms
    )
    return CaseResult(case.op, case.label, case.sizes, case.bound, error, results, failed, case.figures)


def _first_calls(case: Case, setting: Setting) -> tuple[dict[str, float], tuple[Failure, ...]]:
    """Seconds by arm, and the arms that cannot run."""
    seconds, failed = {}, []
    for arm in case.arms:
        if case.prepare is not None:
            case.prepare()
        try:
            seconds[arm.name] = first_seconds(arm.call, setting.device)
        except Exception as error:  # whatever a backend raises: it is reported, and the others are measured
            if is_device_lost():
                raise
            failed.append(Failure(arm.name, reason(error), is_out_of_memory(error)))
        release(setting.device)
    if case.prepare is not None:
        case.prepare()
    return seconds, tuple(failed)


def _share(work: Work | None, bound: str, seconds: float, ceilings: Ceilings) -> float | None:
    if work is None:
        return None
    if bound == "copy":
        return work.n_bytes / seconds / 1e9 / ceilings.copy_gb_per_s
    return work.n_flops / seconds / 1e12 / ceilings.matmul_tflops


def peak_bytes(call: Call, device: str, inputs: tuple[Tensor, ...]) -> int:
    """Most bytes alive during a call, above its inputs."""
    meter: Meter = CudaBytes(inputs) if device == "cuda" else LiveBytes(inputs)
    with meter:
        before = meter.peak_bytes()
        result = call()
        peak = meter.peak_bytes() - before
        del result
    return peak


def release(device: str) -> None:
    """Give back the memory of what nothing names any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
