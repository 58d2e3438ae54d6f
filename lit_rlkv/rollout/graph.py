"""A function that works on fixed buffers, captured as a CUDA graph: then a call is one launch."""

from collections.abc import Callable
from functools import cache

import torch

from lit_rlkv.out_of_memory import is_out_of_memory

N_EAGER_CALLS = 2
"""Calls before the capture, in which Triton compiles and libraries allocate what they work in."""


class Captured:
    """Calls a function; on CUDA the third call captures it, and from then on it is replayed.

    Between calls nothing may change but the contents of tensors: Python does not run again. The function is
    handed in at each call and not kept, so that its owner can be freed as soon as nobody needs it.

    Args:
        generator: whose draws must go on from replay to replay.
        captures: False calls the function as it is.
    """

    def __init__(self, generator: torch.Generator | None, *, captures: bool) -> None:
        self.generator = generator
        self.captures = captures
        self.n_calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None]) -> None:
        """One call, of the same function every time.

        Raises:
            ValueError: at the capture, if the function waits for the device.
        """
        if not self.captures:
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
            # Other threads of the process, loggers among them, may go on using the device meanwhile.
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
    """One stream for all captures and the calls that prepare them.

    What libraries allocate per stream is then ready before the capture, and outside of a graph's own memory,
    which goes with the graph.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on_side_stream(function: Callable[[], None]) -> None:
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
