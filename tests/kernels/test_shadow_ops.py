from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lit_rlkv.kernels.shadow_attention import ops, plan_slots, shadow_attention, shadow_attention_with_lse
from tests.kernels.shadow_cases import Case, cache_evictions, layer_plan, make_case, random_evictions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = pytest.mark.parametrize("block", [None, 16], ids=["contiguous", "listed"])


def make_call(block: int | None) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A scalar function of query, key and value that uses both outputs, and leaves to call it with."""
    case = make_case(17, 2, random_evictions(17)).to(torch.float32).to(DEVICE)
    plan = layer_plan(case.evicted_at, block) if block else None

    def total(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = ops.shadow_attention_with_lse(query, key, value, case.evicted_at, case.scaling, plan=plan)
        return (out * case.out_weight).sum() + (lse.nan_to_num(neginf=0.0) * case.lse_weight).sum()

    return total, [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]


def value_and_gradients(total: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    value = total(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@MODES
def test_activation_checkpointing_changes_nothing(block: int | None):
    total, inputs = make_call(block)

    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(total, *inputs, use_reentrant=False)

    assert same(value_and_gradients(checkpointed, inputs), value_and_gradients(total, inputs))


@pytest.mark.usefixtures("_as_users_run_it")  # the compiler cannot follow the type checks
@MODES
def test_compilation_changes_nothing_and_finds_one_graph(block: int | None):
    total, inputs = make_call(block)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    assert same(value_and_gradients(compiled, inputs), value_and_gradients(total, inputs))


def test_the_registered_operations_pass_torchs_own_checks():
    case = make_case(17, 2, random_evictions(17)).to(torch.float32).to(DEVICE)
    slot_of = layer_plan(case.evicted_at, 16).slot_of
    inputs = (case.query, case.key, case.value, case.evicted_at, slot_of)
    settings = (case.scaling, None, 16, 32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.lit_rlkv.shadow_attention_forward.default, (*inputs, *settings), test_utils=tests
    )
    out, lse = torch.ops.lit_rlkv.shadow_attention_forward(*inputs, *settings)
    torch.library.opcheck(
        torch.ops.lit_rlkv.shadow_attention_backward.default,
        (case.out_weight, case.lse_weight, *inputs, out, lse, *settings),
        test_utils=tests,
    )


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_under_autocast_everything_is_in_the_lower_precision(kernels: str):
    case = make_case(17, 2, random_evictions(17)).to(torch.float32).to(DEVICE)
    inputs = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]

    def attend(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        return shadow_attention_with_lse(*inputs, case.evicted_at, case.scaling, kernels=kernels)

    with torch.autocast(DEVICE, dtype=torch.float16):
        out, lse = attend(inputs)
        plain = shadow_attention(*inputs, case.evicted_at, case.scaling, kernels=kernels)
    low_out, low_lse = attend([t.half() for t in inputs])
    assert out.dtype == plain.dtype == torch.float16
    assert lse.dtype == torch.float32
    assert torch.equal(out, low_out)
    assert torch.equal(lse, low_lse)
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_a_second_derivative_is_refused_rather_than_wrong():
    total, inputs = make_call(None)
    gradients = torch.autograd.grad(total(*inputs).square(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradients[0].sum().backward()


@pytest.mark.usefixtures("_as_users_run_it")
def test_a_plan_of_another_shape_is_refused():
    case = make_case(17, 2, random_evictions(17)).to(torch.float32).to(DEVICE)
    plan = layer_plan(random_evictions(18).to(DEVICE), 16)
    with pytest.raises(
        ValueError, match=r"the plan is for evictions of shape \(2, 2, 18\), not \(2, 2, 17\)"
    ):
        shadow_attention(
            case.query, case.key, case.value, case.evicted_at, case.scaling, plan=plan, kernels="triton"
        )


def test_a_plan_of_blocks_too_small_for_the_kernels_is_refused():
    case = make_case(17, 2, random_evictions(17)).to(torch.float32).to(DEVICE)
    inputs = (case.query, case.key, case.value, case.evicted_at, case.scaling)
    with pytest.raises(ValueError, match="plan with 16 or more"):
        shadow_attention(*inputs, plan=layer_plan(case.evicted_at, 8), kernels="triton")


def test_heads_wider_than_a_tile_are_refused():
    case = make_case(1, 1, random_evictions(1), dim=257).to(torch.float32).to(DEVICE)
    with pytest.raises(ValueError, match="more than 256 dimensions"):
        shadow_attention(case.query, case.key, case.value, case.evicted_at, case.scaling, kernels="triton")


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor had which an operation made."""

    n_elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size()
            for t in tree_leaves(made)
            if isinstance(t, Tensor)
        ]
        self.n_elements = max([self.n_elements, *sizes])
        return made


def largest_tensor(case: Case, kernels: str, block: int | None) -> int:
    with LargestTensor() as largest:
        plan = plan_slots(case.evicted_at[:, None], block) if block else None
        inputs = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]
        out, lse = shadow_attention_with_lse(
            *inputs,
            case.evicted_at,
            case.scaling,
            plan=plan if plan is None else plan.layer(0),
            kernels=kernels,
        )
        torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), inputs)
    return largest.n_elements


def test_no_tensor_grows_with_the_square_of_the_length():
    seq = 256
    evicted_at = cache_evictions(seq, prompt_lens=(9,), n_kv_heads=1)
    case = make_case(seq, 1, evicted_at, n_kv_heads=1).to(torch.float32).to(DEVICE)
    assert largest_tensor(case, "reference", None) >= seq * seq  # the control
    assert largest_tensor(case, "triton", None) <= 16 * seq  # the inputs' size
    assert largest_tensor(case, "triton", 32) <= 16 * seq
