"""The row kernels against float64, in units of the error of the plain definition."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.token_logps import kernel, operations, reference
from tests.kernels.accuracy import bound, excess_error
from tests.tiers import diagonal

# numpy speaks of -inf - -inf and of log 0, which the kernels meet and do not add up.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.7
SEVERAL_TILES = 2 * kernel.N_DEEP * kernel.N_LANES + 5
SHAPES = [(1, 1), (24, 17), (12, 33), (6, 130), (3, 1000), (2, SEVERAL_TILES)]
REAL_SHAPES = [(512, 151_936), (256, 128_256), (130, 50_257), (64, 262_144)]
DTYPES = [torch.float32, torch.float16]
REAL_DTYPES = [*DTYPES, torch.bfloat16]
KINDS = ["usual", "peaked", "equal", "masked"]

Chosen = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
Kl = Callable[[Tensor, Tensor, float], Tensor]


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def make_logits(n_rows: int, vocab: int, kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise = torch.randn(n_rows, vocab, generator=generator, device=DEVICE)
    if kind == "peaked":
        noise = torch.where(noise > 1, 100.0, -100.0) + noise
    if kind == "equal":
        noise = torch.full_like(noise, 3.0)
    if kind == "masked":  # more than a tile of them before the first that counts
        noise[:, : 3 * vocab // 5] = -torch.inf
    return (2 * noise).to(dtype)


def make_inputs(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of two policies, tokens that both can choose, and the gradient that comes from above."""
    n_rows, vocab = shape
    p, q = (make_logits(*shape, kind, dtype, seed) for seed in (1, 2))
    generator = torch.Generator(DEVICE).manual_seed(3)
    tokens = torch.randint(3 * vocab // 5, vocab, (n_rows,), generator=generator, device=DEVICE)
    return p, q, tokens, torch.randn(n_rows, generator=generator, device=DEVICE)


def chosen_results(function: Chosen, logits: Tensor, tokens: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return log-probs, entropies and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    logps, entropy = function(logits, tokens, TEMPERATURE)
    return [logps.detach(), entropy, *torch.autograd.grad(logps, [logits], upstream.to(logps.dtype))]


def kl_results(function: Kl, p: Tensor, q: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return the KL and the gradients of both sides."""
    p, q = p.detach().requires_grad_(), q.detach().requires_grad_()
    kl = function(p, q, TEMPERATURE)
    return [kl.detach(), *torch.autograd.grad(kl, [p, q], upstream.to(kl.dtype))]


def worst(actual: list[Tensor], plain: list[Tensor], truth: list[Tensor]) -> float:
    """The largest excess error; what is exactly right has none, even where plain PyTorch has none either."""
    pairs = zip(actual, plain, truth, strict=True)
    return max(
        (excess_error(*each) for each in pairs if not torch.equal(each[0].double(), each[2])), default=0.0
    )


def chosen_error(function: Chosen, shape: tuple[int, int], kind: str, dtype: torch.dtype) -> float:
    p, _, tokens, upstream = make_inputs(shape, kind, dtype)
    plain = chosen_results(reference.chosen_logps_and_entropy, p, tokens, upstream)
    truth = chosen_results(reference.chosen_logps_and_entropy, p.double(), tokens, upstream)
    return worst(chosen_results(function, p, tokens, upstream), plain, truth)


def kl_error(function: Kl, shape: tuple[int, int], kind: str, dtype: torch.dtype) -> float:
    p, q, _, upstream = make_inputs(shape, kind, dtype)
    plain = kl_results(reference.kl_of_logits, p, q, upstream)
    truth = kl_results(reference.kl_of_logits, p.double(), q.double(), upstream)
    return worst(kl_results(function, p, q, upstream), plain, truth)


@pytest.mark.parametrize(("shape", "kind", "dtype"), diagonal(SHAPES, KINDS, DTYPES))
def test_rows_are_as_accurate_as_torch(shape: tuple[int, int], kind: str, dtype: torch.dtype):
    assert chosen_error(operations.chosen_logps_and_entropy, shape, kind, dtype) <= bound(dtype)
    assert kl_error(operations.kl_of_logits, shape, kind, dtype) <= bound(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", REAL_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_rows_of_real_size_are_as_accurate_as_torch(shape: tuple[int, int], kind: str, dtype: torch.dtype):
    assert chosen_error(operations.chosen_logps_and_entropy, shape, kind, dtype) <= bound(dtype)
    assert kl_error(operations.kl_of_logits, shape, kind, dtype) <= bound(dtype)


CONTROL = ((17, 33), "usual", torch.float16)
"""Inputs of the least precise dtype for which the tests must detect a wrong implementation."""


def test_the_comparison_catches_a_token_off_by_one():
    def shifted(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return operations.chosen_logps_and_entropy(logits, tokens - 1, temperature)

    assert chosen_error(shifted, *CONTROL) > 100.0


def test_the_comparison_catches_a_temperature_forgotten():
    assert (
        chosen_error(lambda x, tokens, _: operations.chosen_logps_and_entropy(x, tokens, 1.0), *CONTROL)
        > 100.0
    )
    assert kl_error(lambda p, q, _: operations.kl_of_logits(p, q, 1.0), *CONTROL) > 100.0


def test_the_comparison_catches_the_other_direction():
    assert kl_error(lambda p, q, t: operations.kl_of_logits(q, p, t), *CONTROL) > 100.0


def test_the_comparison_catches_what_is_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "_chosen_backward", {(17, 1): lambda *args, **kwargs: None})
    assert chosen_error(operations.chosen_logps_and_entropy, *CONTROL) == float("inf")


@pytest.mark.parametrize("function", [reference.kl_of_logits, operations.kl_of_logits])
def test_equal_logits_have_a_kl_of_exactly_zero_and_no_gradient(function: Kl):
    p, q, _, upstream = make_inputs((5, SEVERAL_TILES), "masked", torch.float32)
    assert (kl_results(function, p, q, upstream)[0] != 0).all()
    kl, p_gradient, q_gradient = kl_results(function, p, p, upstream)
    assert (kl == 0).all()
    assert p_gradient.abs().max() <= 1e-6
    assert q_gradient.abs().max() <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", REAL_DTYPES)
def test_equal_logits_of_real_size_have_a_kl_of_exactly_zero(dtype: torch.dtype):
    p, q, *_ = make_inputs((512, 151_936), "usual", dtype)
    assert (operations.kl_of_logits(p, q, TEMPERATURE) != 0).all()
    assert (operations.kl_of_logits(p, p.clone(), TEMPERATURE) == 0).all()


@pytest.mark.parametrize("function", [reference.kl_of_logits, operations.kl_of_logits])
def test_kl_is_infinite_only_where_q_is_zero_and_p_is_not(function: Kl):
    p, q = torch.zeros(1, 3, device=DEVICE), torch.tensor([[0.0, 0.0, -torch.inf]], device=DEVICE)
    assert function(p, q, 1.0).item() == torch.inf
    # q = (1/3, 1/3, 1/3) against p = (1/2, 1/2, 0): log 3/2.
    torch.testing.assert_close(function(q, p, 1.0).cpu(), torch.tensor([1.5]).log())


@pytest.mark.parametrize("rows", [reference, operations])
@pytest.mark.parametrize("poison", [[0.0, torch.nan, 1.0], [-torch.inf] * 3])
def test_logits_without_a_distribution_are_not_hidden(rows: ModuleType, poison: list[float]):
    logits, whole = torch.tensor([poison], device=DEVICE), torch.zeros(1, 3, device=DEVICE)
    assert all(
        x.isnan() for x in rows.chosen_logps_and_entropy(logits, torch.tensor([0], device=DEVICE), 1.0)
    )
    assert rows.kl_of_logits(logits, whole, 1.0).isnan()
    assert not rows.kl_of_logits(whole, logits, 1.0).isfinite()
    assert rows.kl_of_logits(whole, whole, 1.0).isfinite()


def test_a_token_outside_of_the_vocabulary_reads_no_other_row():
    logits, tokens = torch.zeros(4, 3, device=DEVICE), torch.tensor([-1, 0, 2, 3], device=DEVICE)
    logps, entropy = operations.chosen_logps_and_entropy(logits, tokens, 1.0)
    assert logps.isnan().tolist() == [True, False, False, True]
    assert entropy.isfinite().all()


@pytest.mark.parametrize("layout", ["misaligned", "transposed"])
def test_the_layout_of_the_logits_changes_nothing(layout: str):
    p, q, tokens, upstream = make_inputs((5, 130), "usual", torch.float16)

    def laid_out(logits: Tensor) -> Tensor:
        if layout == "transposed":
            return logits.T.contiguous().T
        return torch.nn.functional.pad(logits, (3, 4), value=torch.inf)[:, 3:-4]

    assert not laid_out(p).is_contiguous()
    actual = chosen_results(operations.chosen_logps_and_entropy, laid_out(p), tokens, upstream)
    actual += kl_results(operations.kl_of_logits, laid_out(p), laid_out(q), upstream)
    expected = chosen_results(operations.chosen_logps_and_entropy, p, tokens, upstream)
    expected += kl_results(operations.kl_of_logits, p, q, upstream)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_two_policies_may_have_logits_of_two_types():
    p, q, _, upstream = make_inputs((5, 130), "usual", torch.float32)
    actual = kl_results(operations.kl_of_logits, p, q.half(), upstream)
    assert [x.dtype for x in actual] == [torch.float32, torch.float32, torch.float16]
    for a, b in zip(actual, kl_results(reference.kl_of_logits, p, q.half(), upstream), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("trained", ["p", "q"])
def test_a_side_that_needs_no_gradient_gets_none(trained: str):
    p, q, _, upstream = make_inputs((5, 130), "usual", torch.float32)
    _, *both = kl_results(operations.kl_of_logits, p, q, upstream)
    p.requires_grad_(trained == "p")
    q.requires_grad_(trained == "q")
    operations.kl_of_logits(p, q, TEMPERATURE).backward(upstream)
    for side, gradient, is_trained in ((p, both[0], trained == "p"), (q, both[1], trained == "q")):
        assert torch.equal(side.grad, gradient) if is_trained else side.grad is None


def test_two_calls_agree_to_the_bit():
    p, q, tokens, upstream = make_inputs((3, SEVERAL_TILES), "usual", torch.float16)
    first, second = (
        chosen_results(operations.chosen_logps_and_entropy, p, tokens, upstream)
        + kl_results(operations.kl_of_logits, p, q, upstream)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_gradients_of_the_definition_are_its_finite_differences():
    p, q, tokens, _ = make_inputs((3, 7), "usual", torch.float64)
    p.requires_grad_()
    q.requires_grad_()
    torch.autograd.gradcheck(lambda p: reference.chosen_logps_and_entropy(p, tokens, TEMPERATURE)[0], [p])
    torch.autograd.gradcheck(lambda p, q: reference.kl_of_logits(p, q, TEMPERATURE), [p, q])


def test_the_operations_are_declared_as_they_are():
    p, q, tokens, upstream = make_inputs((3, 7), "usual", torch.float16)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.lit_rlkv.chosen_forward, (p, tokens, 0.7), test_utils=tests)
    torch.library.opcheck(torch.ops.lit_rlkv.kl_forward, (p, q, 0.7), test_utils=tests)
    stats, kl = torch.zeros(4, 3, device=DEVICE), torch.zeros(3, device=DEVICE)
    backward = torch.ops.lit_rlkv.chosen_backward
    torch.library.opcheck(backward, (upstream, p, tokens, stats[:2], 0.7), test_utils=tests)
    for needs in ((True, True), (True, False), (False, True)):
        inputs = (upstream, p, q, kl, stats, 0.7, *needs)
        torch.library.opcheck(torch.ops.lit_rlkv.kl_backward, inputs, test_utils=tests)
