"""The choice between definitions and Triton's kernels: by name, by block, by call, or by the tensor."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lit_rlkv.kernels.backend import (
    TRITON_DTYPES,
    is_interpreted,
    on_tensor_device,
    set_kernels,
    to_autocast_dtype,
    use_kernels,
    uses_triton,
    with_triton,
)
from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.decode_attention import reference as decode_reference
from lit_rlkv.kernels.evict import reference as evict_reference
from lit_rlkv.kernels.shadow_attention import reference as shadow_reference
from lit_rlkv.kernels.shadow_attention import shadow_attention, shadow_attention_with_lse
from lit_rlkv.kernels.slot_scores import reference as score_reference

ON_CPU = torch.zeros(2)


@pytest.fixture(autouse=True)
def _choice_of_the_process_is_restored() -> Iterator[None]:
    with use_kernels("auto"):
        yield


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a machine with a GPU."""
    # Before the switch is set: Triton reads it when it defines its functions, and other tests compile them.
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_an_unknown_name_is_refused_and_changes_nothing():
    message = r"kernels='cuda' is unknown; choose one of auto, reference, triton"
    set_kernels("triton")
    with pytest.raises(ValueError, match=message):
        set_kernels("cuda")
    with pytest.raises(ValueError, match=message), use_kernels("cuda"):
        pass
    with pytest.raises(ValueError, match=message):
        uses_triton(ON_CPU, "cuda")
    assert uses_triton(ON_CPU)


FAKE = FakeTensorMode()


def on_cuda(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor that says it is there, on any machine."""
    with FAKE:
        return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(
    ("process", "call", "on_cpu", "on_cuda_that_fits", "on_cuda_that_does_not"),
    [
        ("auto", None, False, True, False),
        ("auto", "triton", True, True, True),  # which leaves the refusal to the kernel
        ("auto", "reference", False, False, False),
        ("reference", None, False, False, False),
        ("reference", "auto", False, True, False),
        ("reference", "triton", True, True, True),
        ("triton", None, True, True, True),
        ("triton", "auto", False, True, False),
        ("triton", "reference", False, False, False),
    ],
)
def test_the_choice_of_a_call_beats_that_of_the_process(
    process: str,
    call: str | None,
    on_cpu: bool,
    on_cuda_that_fits: bool,
    on_cuda_that_does_not: bool,
    dtype: torch.dtype,
):
    assert is_interpreted()
    set_kernels(process)
    choice = () if call is None else (call,)
    there = on_cuda(2, dtype=dtype)
    assert uses_triton(ON_CPU.to(dtype), *choice) == on_cpu
    assert uses_triton(there, *choice) == on_cuda_that_fits
    assert uses_triton(there, *choice, fits=False) == on_cuda_that_does_not


def test_double_precision_is_the_definitions_alone():
    message = "kernels=triton takes float32, float16, bfloat16, not torch.float64; use kernels=reference"
    for tensor in (ON_CPU.double(), on_cuda(2, dtype=torch.float64)):
        assert not uses_triton(tensor)
        assert not uses_triton(tensor, "reference")
        with pytest.raises(ValueError, match=message):
            uses_triton(tensor, "triton")
        with pytest.raises(ValueError, match=message), use_kernels("triton"):
            uses_triton(tensor)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return which implementation a call runs: the kernels raise, the definitions run on fake tensors."""

    class KernelCalledError(Exception):
        pass

    def kernel(*args: Any, **settings: Any) -> None:
        raise KernelCalledError

    def called(call: Callable[..., Any], *args: Any) -> str:
        try:
            with FAKE:
                call(*args, kernels="auto")
        except KernelCalledError:
            return "kernel"
        except RuntimeError:  # without CUDA a fake tensor cannot be indexed
            pass
        return "definition"

    for name in (
        "decode_attention.kernel.decode_attention",
        "shadow_attention.ops.shadow_attention",
        "shadow_attention.ops.shadow_attention_with_lse",
    ):
        monkeypatch.setattr(f"lit_rlkv.kernels.{name}", kernel)
    return called


@pytest.mark.parametrize("attend", [shadow_attention, shadow_attention_with_lse])
def test_auto_leaves_heads_wider_than_a_tile_to_the_definition(
    attend: Callable[..., Any], chosen: Callable[..., str]
):
    def by_width(dim: int, dim_v: int) -> str:
        query, key = (on_cuda(1, n, 17, dim, dtype=torch.float16) for n in (4, 2))
        value, evicted_at = (
            on_cuda(1, 2, 17, dim_v, dtype=torch.float16),
            on_cuda(1, 2, 17, dtype=torch.int32),
        )
        return chosen(attend, query, key, value, evicted_at, 1.0)

    assert by_width(256, 256) == "kernel"
    assert by_width(257, 64) == by_width(64, 257) == "definition"


def test_auto_leaves_a_group_that_no_program_holds_to_the_definition(chosen: Callable[..., str]):
    def by_size(group: int, dim: int, dtype: torch.dtype) -> str:
        query, pool = (on_cuda(1, 1, n, dim, dtype=dtype) for n in (group, 5))
        return chosen(decode_attention, query, pool, pool, on_cuda(1, dtype=torch.int64), 1.0)

    # 128 x 256 numbers of 2 bytes and 64 x 256 of 4 are 64 KiB.
    assert by_size(128, 256, torch.bfloat16) == by_size(64, 256, torch.float32) == "kernel"
    assert by_size(129, 256, torch.bfloat16) == by_size(65, 256, torch.float32) == "definition"


def test_a_block_restores_what_it_was_nested_in_also_after_an_error():
    with use_kernels("triton"):
        with use_kernels("reference"):
            assert not uses_triton(ON_CPU)
        assert uses_triton(ON_CPU)
        with pytest.raises(RuntimeError, match="inside"), use_kernels("reference"):
            raise RuntimeError("inside")
        assert uses_triton(ON_CPU)
    assert not uses_triton(ON_CPU)


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(
    ("definition", "kernel"),
    [
        (decode_reference.decode_attention, "decode_attention.kernel.decode_attention"),
        (evict_reference.evict, "evict.kernel.evict"),
        (shadow_reference.shadow_attention_with_lse, "shadow_attention.ops.shadow_attention_with_lse"),
        *(
            (getattr(score_reference, name), f"slot_scores.{kind}_kernel.{name}")
            for kind, names in {
                "keys": ("key_norm", "key_direction_similarity", "redundancy"),
                "window": ("mean_window_attention", "peak_window_attention", "expected_attention"),
            }.items()
            for name in names
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kernel_takes_the_arguments_of_its_definition(definition: Callable[..., Any], kernel: str):
    found = parameters(pkgutil.resolve_name(f"lit_rlkv.kernels.{kernel}"))
    assert list(found.items()) == list(parameters(definition).items())


def test_the_operation_may_be_called_by_keyword():
    def add(a: Tensor, b: Tensor) -> Tensor:
        """Return a + b."""
        return a + b

    def add_in_triton(a: Tensor, b: Tensor) -> Tensor:
        return a + b + 100

    module = ModuleType("kernel")
    module.add = add_in_triton
    operation = with_triton(add, lambda: module, chosen_by="b")
    assert operation.__doc__ == "Return a + b."
    assert operation(ON_CPU.double(), b=ON_CPU, kernels="triton").tolist() == [100, 100]
    assert operation(ON_CPU, ON_CPU).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        operation(a=ON_CPU, b=ON_CPU.double(), kernels="triton")


def test_triton_on_a_cpu_without_the_interpreter_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch):
    assert uses_triton(ON_CPU, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not is_interpreted()
    with pytest.raises(
        ValueError,
        match=r"needs tensors on CUDA, and these are on cpu; use kernels=auto, or set TRITON_INTERPRET=1",
    ):
        uses_triton(ON_CPU, "triton")


def test_on_tensor_device_passes_arguments_and_results():
    @on_tensor_device
    def launch(scale: float, tensor: Tensor, *, shift: float = 0.0) -> tuple[float, Tensor, float]:
        """Launches nothing."""
        return scale, tensor, shift

    assert launch(2.0, ON_CPU, shift=3.0) == (2.0, ON_CPU, 3.0)
    assert launch(2.0, tensor=ON_CPU) == (2.0, ON_CPU, 0.0)
    assert launch.__doc__ == "Launches nothing."


def test_autocast_lowers_all_but_double_precision():
    single, double = torch.ones(2, dtype=torch.float32), torch.ones(2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        lowered, untouched = to_autocast_dtype(single, double)
    assert lowered.dtype == torch.bfloat16
    assert untouched is double
    for same, tensor in zip(to_autocast_dtype(single, double), (single, double), strict=True):
        assert same is tensor
