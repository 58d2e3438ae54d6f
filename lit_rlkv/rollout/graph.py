"""Run a function as a CUDA graph, with one launch for all its kernels."""

from collections.abc import Callable
from functools import cache

import torch

from lit_rlkv.out_of_memory import is_out_of_memory

N_EAGER_CALLS = 2
"""Calls before the capture, in which Triton compiles and libraries allocate their workspaces."""


class CudaGraphRunner:
    """Runs a function; the third call captures it as a CUDA graph, which later calls replay.

    Between calls only the contents of tensors may change, because a replay runs no Python. The function is
    passed to each call and not stored, so that its owner can be freed at once.

    Args:
        generator: its draws continue from replay to replay.
        is_enabled: if False, every call runs the function without a graph.
    """

    def __init__(self, generator: torch.Generator | None, *, is_enabled: bool) -> None:
        self.generator = generator
        self.is_enabled = is_enabled
        self.n_calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None]) -> None:
        """Run `function`, which must be the same at every call.

        Raises:
            ValueError: the function waits for the device, so it cannot be captured.
        """
        if not self.is_enabled:
            function()
            return
        if self.graph is None:
            self.n_calls += 1
            if self.n_calls <= N_EAGER_CALLS:
                _on_side_stream(function)
                return
            self.graph = self._capture(function)
        self.graph.replay()

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        try:
            # Other threads of the process, for example loggers, may use the device during the capture.
            with torch.cuda.graph(
                graph, stream=_side_stream(torch.cuda.current_device()), capture_error_mode="thread_local"
            ):
                function()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"a decode step of this model cannot be captured as a CUDA graph ({error}); start again with "
                "rollout.cuda_graph=false, or cuda_graph=False where you call generate"
            ) from error
        return graph


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
