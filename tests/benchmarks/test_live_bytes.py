import pytest
import torch
from live_bytes import CudaBytes, LiveBytes, storage_bytes
from torch.autograd.profiler import profile
from torch.utils.checkpoint import checkpoint

from tests.models_zoo import tiny_model

N = 64
UNIT = N * N * 4
"""Bytes of an N × N matrix in float32."""


def units(n_bytes: int) -> float:
    """Whole matrices; scalars are left out."""
    return n_bytes // UNIT


def matrix(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(N, N, requires_grad=requires_grad)


def test_tensors_count_until_they_are_freed():
    with LiveBytes() as meter:
        first, second = matrix(), matrix()
        assert meter.live == 2 * UNIT
        third = first + second
        assert meter.live == 3 * UNIT
        del first, third
        assert meter.live == UNIT
        assert meter.peak_bytes() == 3 * UNIT
    del second
    assert meter.live == 0


def test_views_and_writes_in_place_take_no_bytes():
    with LiveBytes() as meter:
        whole = matrix()
        views = [whole.t(), whole[1:], whole.view(-1).unsqueeze(0)]
        whole.add_(1.0)
        del whole
        assert meter.live == UNIT
        del views
        assert meter.live == 0


def test_earlier_tensors_count_once_from_the_start():
    weight = matrix()
    with LiveBytes([weight, weight.t(), weight[2:]]) as meter:
        assert meter.live == UNIT
        view = weight.t()
        assert meter.live == UNIT
        del view
    # The control: not named beforehand, it counts only from the first view of it on.
    with LiveBytes() as meter:
        assert meter.live == 0
        assert weight.t().shape == (N, N)
        assert meter.live == UNIT


def test_tensors_saved_by_autograd_live_until_the_backward_pass():
    x = matrix(requires_grad=True)
    with LiveBytes([x]) as meter:
        loss = (x.exp() * 2.0).sum()
        assert units(meter.live) == 2  # x, and exp(x), which no name holds
        loss.backward()
        assert units(meter.live) == 2  # x and its gradient
        x.grad = None
        assert units(meter.live) == 1


def test_the_backward_pass_of_a_matmul_matches_hand_arithmetic():
    x, w = matrix(), matrix(requires_grad=True)
    with LiveBytes([x, w]) as meter:
        y = x @ w
        loss = (y * y).sum()
        # x, w, y and the square, which is let go of once it is summed
        assert units(meter.peak_bytes()) == 4
        assert units(meter.live) == 3
        meter.reset_peak()
        assert units(meter.peak_bytes()) == 3
        del y
        loss.backward()
        # x, w, y and the two halves of its gradient, g·y and y·g; when they are added y is no longer needed
        assert units(meter.peak_bytes()) == 5
        assert units(meter.live) == 3  # x, w and the gradient of w


def test_recomputed_layers_are_seen_in_the_backward_pass():
    weights = [matrix(requires_grad=True) for _ in range(4)]

    def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = (x @ weight).tanh()
        return x

    def run(is_checkpointed: bool) -> tuple[float, float]:
        for weight in weights:
            weight.grad = None
        x = matrix()
        with LiveBytes([x, *weights]) as meter:
            output = (
                checkpoint(chain, x, *weights, use_reentrant=False) if is_checkpointed else chain(x, *weights)
            )
            after_forward = units(meter.live)
            meter.reset_peak()
            output.sum().backward()
            return after_forward, units(meter.peak_bytes())

    kept, kept_peak = run(False)
    dropped, recomputed_peak = run(True)
    assert kept == 5 + 4  # x, four weights, four activations
    assert dropped == 5 + 1  # only the last one, which is the output
    assert recomputed_peak >= kept_peak


def allocator_bytes(events: list) -> tuple[int, int]:
    """Return the live bytes at the end of a profile, and their peak."""
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return live, peak


def test_the_count_is_that_of_the_allocator():
    model = tiny_model()
    input_ids = torch.randint(1, 60, (4, 24))

    def step() -> None:
        model(input_ids, use_cache=False).logits.logsumexp(-1).sum().backward()

    step()  # what the first call sets up is not ours to count
    model.zero_grad()
    with profile(profile_memory=True, use_kineto=True) as profiled:
        step()
    live, peak = allocator_bytes(profiled.kineto_results.events())
    model.zero_grad()
    with LiveBytes([*model.parameters(), *model.buffers(), input_ids]) as meter:
        before = meter.live
        step()
    assert live == meter.live - before == storage_bytes(model.parameters())  # a gradient for each weight
    model.zero_grad()
    assert meter.live == before
    # Kernels use some memory inside, which no operator returns: less than 1 % here.
    assert 0.99 * peak < meter.peak_bytes() - before <= peak


def test_tied_and_shared_storages_count_once():
    tied = matrix()
    assert storage_bytes([tied, tied, tied.t(), tied[3:]]) == UNIT
    assert storage_bytes([tied, tied.clone()]) == 2 * UNIT


@pytest.mark.gpu
def test_cuda_counts_from_what_was_there():
    weight = torch.randn(N, N, device="cuda")
    other = torch.randn(N, N, device="cuda")
    with CudaBytes([weight]) as meter:
        sums = [weight + 1.0, weight + 2.0]
        del sums
        kept = weight * 2.0
        assert meter.peak_bytes() == 3 * UNIT
        meter.reset_peak()
        assert meter.peak_bytes() == 2 * UNIT
    del other, kept
