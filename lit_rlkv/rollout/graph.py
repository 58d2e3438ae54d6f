"""Run a function as a CUDA graph, with one launch for all its kernels."""

import logging
from collections.abc import Callable
from functools import cache

import torch

from lit_rlkv.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

N_EAGER_CALLS = 2
"""Calls before the capture, in which Triton compiles and libraries allocate their workspaces."""


class CudaGraphRunner:
    """Runs a function; the third call captures it as a CUDA graph, which later calls replay.

    Between calls only the contents of tensors may change, because a replay runs no Python. The function is
    passed to each call and not stored, so that its owner can be freed at once.

    Args:
        generator: its draws continue from replay to replay.
        is_enabled: if False, every call runs the function without a graph. It becomes False if the function
            cannot be captured.
        is_required: raise an error if the function cannot be captured; otherwise warn, and run it without.
    """

    def __init__(
        self, generator: torch.Generator | None, *, is_enabled: bool, is_required: bool = False
    ) -> None:
        self.generator = generator
        self.is_enabled = is_enabled
        self.is_required = is_required
        self.n_calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None]) -> None:
        """Run `function`, which must be the same at every call.

        Raises:
            ValueError: the function cannot be captured, for example because it waits for the device, and the
                graph is required.
        """
        if self.is_enabled and self.graph is None:
            self.n_calls += 1
            if self.n_calls <= N_EAGER_CALLS:
                _on_side_stream(function)
                return
            self._try_to_capture(function)
        if self.graph is None:
            function()
        else:
            self.graph.replay()

    def forget(self) -> None:
        """Drop the graph, because tensors have moved; the third call from now captures another."""
        self.graph, self.n_calls = None, 0

    def _try_to_capture(self, function: Callable[[], None]) -> None:
        try:
            self.graph = _capture(function, self.generator)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            cause = error.__context__ or error  # the end of a capture tells only that something broke it
            if self.is_required:
                raise ValueError(
                    f"a decode step of this model cannot be captured as a CUDA graph ({cause}); set "
                    "rollout.cuda_graph=null, or cuda_graph=None where you call generate, to decode without "
                    "a graph where there can be none"
                ) from error
            log.warning("decoding without a CUDA graph, which is slower: the capture failed (%s)", cause)
            self.is_enabled = False


def _capture(function: Callable[[], None], generator: torch.Generator | None) -> torch.cuda.CUDAGraph:
    """Capture the function without running it.

    Raises:
        RuntimeError: the capture failed. The generators are then as before.
    """
    device = torch.cuda.current_device()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    before = torch.cuda.current_stream(device)
    # A capture that fails leaves generators in a state in which they draw for graphs only.
    used = [torch.cuda.default_generators[device], *([] if generator is None else [generator])]
    states = [(each, each.clone_state()) for each in used]
    if generator is not None:
        graph.register_generator_state(generator)
    try:
        # Other threads of the process, for example loggers, may use the device during the capture.
        with torch.cuda.graph(
            graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local"
        ):
            function()
    except RuntimeError:
        torch.cuda.set_stream(before)  # the end of a broken capture raises before torch restores it
        for each, state in states:
            each.graphsafe_set_state(state)
        _leave_pool(device, pool)
        raise
    return graph


def _leave_pool(device: int, pool: tuple[int, int]) -> None:
    """End the allocation to the pool of a capture that failed, if torch has not, and free the pool.

    Older releases of torch do not (pytorch/pytorch#180395). Their allocator then acts as if the capture went
    on: `empty_cache` frees nothing, and so nothing is freed where memory runs out. A torch that ends the
    allocation may keep the pool, which holds what one step allocates.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # torch has done so, and may release the pool itself
    torch._C._cuda_releasePool(device, pool)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures and of the calls before them.

    Libraries allocate workspaces per stream. With one stream they exist before the capture, outside of the
    memory that belongs to the graph.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on_side_stream(function: Callable[[], None]) -> None:
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
