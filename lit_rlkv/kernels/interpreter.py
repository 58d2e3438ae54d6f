"""Repair of Triton's interpreter for numpy 2.5. Import it only where TRITON_INTERPRET is set."""

from typing import Any

import triton
from triton.runtime import interpreter


def accept_numpy_2_5() -> None:
    """Let kernels count with `range` under Triton 3.6.

    Its interpreter calls int() on an array of one element, which numpy 2.5 refuses; Triton 3.7 does not.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) != (3, 6):
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
