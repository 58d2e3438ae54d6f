"""Metrics of the optimizer steps of an iteration, over micro-batches, steps and ranks; and their checks."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_rlkv.checks import OneLineError
from lit_rlkv.diagnostics import as_floats
from lit_rlkv.distributed.ranks import ranks_of

MAXIMA = ("kv/replay_gap",)
"""Metrics whose maximum is logged; all others are summed over micro-batches and averaged over steps."""
GRAD_NORM = "grad_norm"
"""Metric of the norm of all gradients, and last part of the names of others, all before clipping."""
AXIS = "iteration"
"""Column of metrics.csv that is no metric."""


class MetricError(OneLineError, TypeError):
    """A callback's metric or loss term that cannot be used."""


def checked_metrics(
    callback: object, metrics: Mapping[str, Any], taken: Collection[str] = (AXIS,)
) -> dict[str, Tensor]:
    """Return the metrics or loss terms of a callback as scalar tensors. NaN and infinity are numbers.

    Args:
        taken: names that mean something else.

    Raises:
        MetricError: a name is not a text that a file can hold, or a value is not one real number.
    """
    whose = type(callback).__name__
    for name in metrics:
        is_text = isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)
        if not is_text or name in ("", *taken):
            why = "is used already" if name in taken else "must be a text of Unicode characters"
            raise MetricError(f"the name {name!r} of a metric of {whose} {why}; rename it")
    return {name: _as_scalar(f"the metric {name!r} of {whose}", value) for name, value in metrics.items()}


def _as_scalar(what: str, value: Any) -> Tensor:
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # of what torch cannot convert
        found = torch.tensor(float(value), dtype=torch.float64) if isinstance(value, Real) else value
        found = torch.as_tensor(found)
        if found.numel() == 1 and not found.is_complex():
            return found.reshape(())
    got = f"{value!r:.60}" if isinstance(value, str | complex) else f"a value of type {type(value).__name__}"
    raise MetricError(f"{what} must be one real number, got {got}; correct it")


class MetricSums:
    """Metrics of one iteration, summed on the device so that no micro-batch synchronises with the host."""

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self.done: list[dict[str, Tensor]] = []
        """The metrics of each step that was not skipped."""
        self.n_skipped = 0

    def add(self, outputs: Mapping[str, Tensor]) -> None:
        """Add the outputs of one micro-batch."""
        for name, value in outputs.items():
            value = value.detach()
            before = self.step.get(name, torch.zeros_like(value))
            self.step[name] = torch.maximum(before, value) if name in MAXIMA else before + value

    def end_step(self, grad_norm: Tensor, is_finite: bool) -> None:
        """Complete an optimizer step; the metrics of a skipped step are dropped."""
        if is_finite:
            self.done.append({**self.step, GRAD_NORM: grad_norm})
        else:
            self.n_skipped += 1
        self.step = {}

    def means(self, fabric: Fabric) -> dict[str, float]:
        """Return each metric's mean over the steps in which any rank reported it, and the skipped steps.

        The metric of a step is the sum of what the ranks report, each of which may report other names. All
        ranks must call this.
        """
        own = list(dict.fromkeys(name for step in self.done for name in step))
        names = list(dict.fromkeys(ranks_of(fabric).all_gather_object(own)))
        # Gradient norms are global already.
        maxima = [name for name in names if name in MAXIMA or name.rpartition("/")[2] == GRAD_NORM]
        sums = [name for name in names if name not in maxima]
        found = self._reduced(fabric, maxima, "max", -torch.inf) | self._reduced(fabric, sums, "sum", 0.0)
        return as_floats({name: found[name] for name in names}) | {"skipped_steps": float(self.n_skipped)}

    def _reduced(self, fabric: Fabric, names: list[str], kind: str, absent: float) -> dict[str, Tensor]:
        if not names:
            return {}
        nothing = torch.full((), absent, device=fabric.device)
        rows = [torch.stack([step.get(name, nothing).to(nothing) for name in names]) for step in self.done]
        is_reported = torch.tensor([[name in step for name in names] for step in self.done])
        values = torch.as_tensor(fabric.all_reduce(torch.stack(rows), reduce_op=kind))
        counted = torch.as_tensor(fabric.all_reduce(is_reported.to(nothing), reduce_op="max"))
        means = values.masked_fill(counted == 0, 0.0).sum(dim=0) / counted.sum(dim=0)
        return dict(zip(names, means, strict=True))
