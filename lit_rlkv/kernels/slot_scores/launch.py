"""What the launches of this room have in common."""

from torch import Tensor


def dense_vectors(pool: Tensor) -> Tensor:
    """The pool itself, whatever its strides, unless the numbers of one vector are apart."""
    return pool if pool.stride(-1) == 1 else pool.contiguous()


def due_argument(is_due: Tensor | None, other: Tensor) -> tuple[Tensor, bool]:
    """The due rows for a kernel and whether there are such; an argument has to be there, read or not."""
    return (other, False) if is_due is None else (is_due.contiguous(), True)


def layout(keys: Tensor) -> tuple[int, ...]:
    """Strides of row, KV head and slot, and the sizes that kernels count with."""
    return (*keys.stride()[:3], keys.shape[1], keys.shape[2], keys.shape[3])
