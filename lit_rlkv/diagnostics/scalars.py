"""Named scalars on the device, and their transfer to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor

Scalars = dict[str, Tensor]


def as_floats(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the scalars as floats, with one transfer."""
    if not scalars:
        return {}
    device = next(iter(scalars.values())).device  # a callback's own term may lie on another
    values = torch.stack([value.float().to(device) for value in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))
