"""A function that works on fixed buffers, captured as a CUDA graph: then a call is one launch."""

from collections.abc import Callable

import torch

N_EAGER_CALLS = 2
"""Calls before the capture, in which Triton compiles and libraries allocate what they work in."""


class Captured:
    """Call it in place of the function it wraps: on CUDA the third call captures it, and replays begin.

    Between calls nothing may change but the contents of tensors: Python does not run again.

    Args:
        generator: whose draws must go on from replay to replay.
        captures: False calls the function as it is.

    Raises:
        ValueError: at the capture, if the function waits for the device or allocates what it returns.
    """

    def __init__(
        self, function: Callable[[], None], generator: torch.Generator | None, *, captures: bool
    ) -> None:
        self.function = function
        self.generator = generator
        self.captures = captures
        self.n_calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.captures:
            self.function()
            return
        if self.graph is None:
            self.n_calls += 1
            if self.n_calls <= N_EAGER_CALLS:
                self._on_side_stream()
                return
            self.graph = self._capture()
        self.graph.replay()

    def _on_side_stream(self) -> None:
        """A capture runs on a stream of its own, and what libraries keep per stream must be ready there."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.function()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph):
                self.function()
        except RuntimeError as error:
            raise ValueError(
                f"a decode step of this model cannot be captured as a CUDA graph ({error}); set "
                "rollout.cuda_graph=false, or pass cuda_graph=False to generate"
            ) from error
        return graph
