"""What the launches of this room have in common."""

from torch import Tensor


def due_argument(is_due: Tensor | None, other: Tensor) -> tuple[Tensor, bool]:
    """The due rows for a kernel and whether there are such; an argument has to be there, read or not."""
    return (other, False) if is_due is None else (is_due.contiguous(), True)


def layout(keys: Tensor) -> tuple[int, ...]:
    """Strides of row, KV head and slot, and the sizes that kernels count with."""
    return (*keys.stride()[:3], keys.shape[1], keys.shape[2], keys.shape[3])
