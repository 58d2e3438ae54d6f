"""Diagnostics: pure statistics of rollouts, gradients and caches; callbacks decide when they are taken."""

from collections.abc import Mapping

import torch
from torch import Tensor

Scalars = dict[str, Tensor]
"""Named scalars on the device."""


def as_floats(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the scalars as floats, with one transfer to the host."""
    if not scalars:
        return {}
    device = next(iter(scalars.values())).device  # a callback's own term may be on another device
    values = torch.stack([value.float().to(device) for value in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))
