"""Which implementation of a hot operation runs: the plain definition or the Triton kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Output = TypeVar("Output")

KERNELS = ("auto", "reference", "triton")
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_chosen = "auto"
"""Of the whole process, not of a thread: a backward pass runs in threads of its own."""


def set_kernels(kernels: str) -> None:
    """Choose for all calls that do not choose themselves: `auto` is Triton on CUDA, the definition elsewhere.

    Raises:
        ValueError: an unknown name.
    """
    global _chosen
    _chosen = _checked(kernels)


@contextmanager
def using(kernels: str) -> Iterator[None]:
    """`set_kernels` for the length of a block."""
    before = _chosen
    set_kernels(kernels)
    try:
        yield
    finally:
        set_kernels(before)


def uses_triton(tensor: Tensor, kernels: str | None = None, *, fits: bool = True) -> bool:
    """Whether an operation on this tensor runs its Triton kernel; None leaves it to the process's choice.

    Args:
        fits: that the kernel can take a tensor of this size; if not, `auto` takes the definition.

    Raises:
        ValueError: Triton is asked for by name and cannot take the tensor.
    """
    choice = _chosen if kernels is None else _checked(kernels)
    if choice == "reference":
        return False
    if choice == "auto":
        return fits and tensor.is_cuda and tensor.dtype in TRITON_DTYPES
    if tensor.dtype not in TRITON_DTYPES:
        raise ValueError(
            f"kernels=triton takes float32, float16 and bfloat16, not {tensor.dtype}; use kernels=reference"
        )
    if not (tensor.is_cuda or is_interpreted()):
        raise ValueError(
            f"kernels=triton needs tensors on CUDA, and these are on {tensor.device.type}; use kernels=auto, "
            "or set TRITON_INTERPRET=1 before the start to run the kernels, slowly, in Triton's interpreter"
        )
    return True


def on_its_device(launch: Callable[Given, Output]) -> Callable[Given, Output]:
    """Run what launches kernels on the device of its first tensor: Triton takes the current one."""

    @wraps(launch)
    def launched(*args: Given.args, **kwargs: Given.kwargs) -> Output:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
            return launch(*args, **kwargs)

    return launched


def with_unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself, whatever its strides, unless the numbers of its last dimension are apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What torch's own attention does under autocast: everything but float64 in the lower precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python on the CPU, as tests have it do."""
    import triton  # not at the top: it exists on Linux only

    return bool(triton.knobs.runtime.interpret)


def _checked(kernels: str) -> str:
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
    return kernels
