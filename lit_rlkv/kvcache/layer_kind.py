"""LayerKind: the memory that a layer of a model has of earlier tokens."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, by its memory of earlier tokens."""

    attends: bool = True
    """True if it has keys and values."""
    window: int | None = None
    """Sliding window in tokens; None: its queries see all keys. One of `seq_len` and more changes nothing."""
    in_chunks: bool = False
    """True if the window does not slide: sequences are cut into chunks of its length, and a query sees the
    keys of its own."""
    n_states: int = 0
    """States of a convolution or recurrence."""

    @property
    def in_profile(self) -> bool:
        """True if a budget profile gives the layer a budget of its own."""
        return self.attends and self.window is None

    def expiry(self, column: Int[Tensor, "*#row seq"], first: Int[Tensor, "*#row 1"]) -> Tensor:
        """Return, for each key of a layer with a window, the first column whose query no longer sees it.

        Args:
            first: column of the first token of each row, after its padding.
        """
        assert self.window is not None
        if not self.in_chunks:
            return column + self.window
        return first + ((column - first) // self.window + 1) * self.window
