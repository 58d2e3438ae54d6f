"""Selection of an operation's implementation: the plain definition or the Triton kernel."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

Given = ParamSpec("Given")
Output = TypeVar("Output")
Attention = TypeVar("Attention", bound=Callable[..., Any])

KERNELS = ("auto", "reference", "triton")
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_chosen = "auto"
"""The choice of the process, not of a thread, because autograd runs backward passes in its own threads."""


def set_kernels(kernels: str) -> None:
    """Set the implementation for the process: `auto` is Triton on CUDA and the definition elsewhere.

    Raises:
        ValueError: `kernels` is not in `KERNELS`.
    """
    global _chosen
    _chosen = _checked(kernels)


@contextmanager
def use_kernels(kernels: str) -> Iterator[None]:
    """Set the implementation within a `with` block, and restore the previous choice at its end."""
    before = _chosen
    set_kernels(kernels)
    try:
        yield
    finally:
        set_kernels(before)


def uses_reference() -> bool:
    """Return True if the process runs the definitions alone."""
    return _chosen == "reference"


def uses_triton(
    tensor: Tensor,
    kernels: str | None = None,
    *,
    fits: bool = True,
    dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES,
) -> bool:
    """Return True if an operation on this tensor runs its Triton kernel.

    Args:
        kernels: `auto`, `reference` or `triton`; None takes the choice of the process.
        fits: True if the kernel can hold a tensor of this size; `auto` takes the definition otherwise.
        dtypes: those that the kernel takes.

    Raises:
        ValueError: `kernels` is unknown, or is `triton` and Triton cannot take the tensor.
    """
    choice = _chosen if kernels is None else _checked(kernels)
    if choice == "reference":
        return False
    if choice == "auto":
        return fits and tensor.is_cuda and tensor.dtype in dtypes
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"kernels=triton takes {known}, not {tensor.dtype}; use kernels=reference")
    if not (tensor.is_cuda or is_interpreted()):
        raise ValueError(
            f"kernels=triton needs tensors on CUDA, and these are on {tensor.device.type}; use kernels=auto, "
            "or set TRITON_INTERPRET=1 before the start to run the kernels, slowly, in Triton's interpreter"
        )
    return True


def with_triton(
    definition: Callable[Given, Output],
    load_kernels: Callable[[], ModuleType],
    *,
    chosen_by: str,
    fits: Callable[..., bool] | None = None,
    dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES,
) -> Callable[Given, Output]:
    """Return the operation that runs its plain definition or the Triton kernel of the same name.

    The operation has the signature and the docstring of the definition. It also takes `kernels`, which
    overrides the choice of the process for one call. The kernel takes the same arguments.

    Args:
        load_kernels: imports the module of the Triton kernel, by an import statement because torch.compile
            does not trace `import_module`; called at first use, because Triton exists on Linux only.
        chosen_by: name of the argument whose device and dtype decide.
        fits: called with the operation's arguments; False if the kernel cannot hold tensors of this size.
        dtypes: those that the kernel takes.
    """
    place = list(inspect.signature(definition).parameters).index(chosen_by)

    @wraps(definition)
    def operation(*args: Any, kernels: str | None = None, **kwargs: Any) -> Output:
        tensor = args[place] if place < len(args) else kwargs[chosen_by]
        if uses_triton(tensor, kernels, fits=fits is None or fits(*args, **kwargs), dtypes=dtypes):
            return cast(Output, getattr(load_kernels(), definition.__name__)(*args, **kwargs))
        return definition(*args, **kwargs)

    return cast(Callable[Given, Output], operation)


def register_operation(
    name: str, schema: str, launch: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register a launch as a torch operator; `fake` returns empty outputs of the same shapes."""
    operation = torch.library.custom_op(f"lit_rlkv::{name}", launch, mutates_args=(), schema=schema)
    operation.register_fake(fake)
    return operation


def on_tensor_device(launch: Callable[Given, Output]) -> Callable[Given, Output]:
    """Decorate a function that launches kernels: they run on the device of its first tensor.

    Triton launches on the current device.
    """

    @wraps(launch)
    def launched(*args: Given.args, **kwargs: Given.kwargs) -> Output:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
            return launch(*args, **kwargs)

    return launched


def with_unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def autocast_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that attention computes in: that of autocast, if enabled, or float64."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return dtype
    return torch.get_autocast_dtype(device)


def to_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast all tensors but float64 to the autocast dtype, as torch's own attention does under autocast."""
    return tuple(t.to(autocast_dtype(t.device.type, t.dtype)) for t in tensors)


def in_autocast_dtype(attend: Attention) -> Attention:
    """Decorate attention: cast query, key and value as autocast would, and switch autocast off inside."""

    @wraps(attend)
    def attended(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key, value = to_autocast_dtype(query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            return attend(query, key, value, *args, **kwargs)

    return cast(Attention, attended)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # Triton reads it outside of Python
def is_interpreted() -> bool:
    """Return True if Triton runs kernels in Python on the CPU, as in the tests."""
    import triton  # not at the top: it exists on Linux only

    return bool(triton.knobs.runtime.interpret)


def _checked(kernels: str) -> str:
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
    return kernels
