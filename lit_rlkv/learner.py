"""Losses to gradients to optimizer steps, the same on every rank; what is logged of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import lightning as L
import torch
from lightning import Callback
from lightning.fabric import Fabric
from lightning.fabric.plugins import HalfPrecision
from torch import Tensor, nn

from lit_rlkv.diagnostics.scalars import as_floats
from lit_rlkv.faults import FiniteSteps
from lit_rlkv.models.backbone import is_sharded
from lit_rlkv.ranks import IN_STEP
from lit_rlkv.sharding import (
    average_whole_gradients,
    clip_gradients,
    keep_kinds_apart,
    state_like,
    whole_state,
)

MAXIMA = ("kv/replay_gap",)
"""Metrics of which the largest counts; all others add up over micro-batches and are averaged over steps."""


class _Held:
    """A batch that goes through Fabric as it is: Fabric looks for tensors to convert, and refuses ours."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class _Step(nn.Module):
    """A training step as the forward of a module, which is what Fabric and DDP wrap."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, held: _Held, index: int) -> dict[str, Tensor]:
        return cast("dict[str, Tensor]", self.module.training_step(held.batch, index))


class Learner:
    """A module with its optimizer on the devices of a run.

    A step whose gradient is not finite is left out and counted (`skipped_steps`).

    Args:
        module: on several ranks one with `idle_parameters`, as all of `lit_rlkv.modules` have.
        max_grad_norm: that gradients are clipped to; None clips none.
        state: of an earlier one, to go on from.

    Raises:
        ValueError: a Fabric that would change the precision of the module's parameters to 16 bit.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: L.LightningModule,
        callbacks: Sequence[Callback],
        max_grad_norm: float | None,
        state: dict[str, Any] | None,
    ) -> None:
        self.fabric = fabric
        self.module = module
        self.callbacks = callbacks
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        if isinstance(fabric.strategy.precision, HalfPrecision):
            raise ValueError(
                f"Fabric(precision={fabric.strategy.precision.precision!r}) would round adapters, heads and "
                "buffers, too; load the backbone in that precision, and leave Fabric's at 32-true"
            )
        IN_STEP.wait()  # no layer may be whole while an optimizer takes its parameters
        self.is_sharded = is_sharded(module)
        configured, self.scheduler = _unpack(module.configure_optimizers())
        keep_kinds_apart(configured)
        # One after the other, as sharded modules must be.
        self.model = fabric.setup_module(_Step(module))
        self.optimizer = cast("torch.optim.Optimizer", fabric.setup_optimizers(configured))
        self.precision = fabric.strategy.precision
        self.guard = FiniteSteps()
        self._learners: set[str] = set()
        """Roles that learn in the step under way."""
        self.sums = MetricSums()
        if state is not None:
            self.load_state_dict(state)

    def learn(self, batch: Any, index: int) -> None:
        """One micro-batch, and an optimizer step where it ends one.

        `batch` says so by `ends_step`, and names by `learners` the roles that learn from it.
        """
        fabric = self.fabric
        # Sharded layers exchange the gradients of each micro-batch, so that no rank holds whole ones.
        with fabric.no_backward_sync(self.model, enabled=not batch.ends_step and not self.is_sharded):
            outputs = self.model(_Held(batch), index)
            IN_STEP.wait()  # a backward pass is an exchange too
            # Denominators are those of all ranks, and gradients are averaged over the ranks.
            fabric.backward(outputs["loss"] * fabric.world_size)
        self.sums.add(outputs)
        self._learners |= {*batch.learners}
        if batch.ends_step:
            self._step()

    def _step(self) -> None:
        if self.fabric.world_size > 1:
            # Ranks exchange zeros for them, which an optimizer would count, and decay the weights by.
            idle = cast("Callable[[set[str]], list[nn.Parameter]]", self.module.idle_parameters)
            for parameter in idle(self._learners):
                parameter.grad = None
        self._learners = set()
        norm = self._clip()
        scaler = getattr(self.precision, "scaler", None)
        loss_scale = 1.0 if scaler is None else scaler.get_scale()
        is_finite = self.guard.may_step(norm, self.sums.step, loss_scale)
        # A scaler of float16 leaves out the step by itself, and learns from it that it must scale less.
        if is_finite or scaler is not None:
            call(self.callbacks, "on_before_optimizer_step", None, self.module, self.optimizer)
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.sums.end_step(norm, is_finite)

    def _clip(self) -> Tensor:
        """The norm of the gradients of all ranks before it was clipped."""
        if self.is_sharded:
            average_whole_gradients(self.module)
            return clip_gradients(self.module, self.max_grad_norm)
        norm = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=self.max_grad_norm, error_if_nonfinite=False
        )
        assert norm is not None  # None is for clipping by value
        return norm

    def metrics(self) -> dict[str, float]:
        """Of all steps since this was last asked."""
        means, self.sums = self.sums.means(self.fabric), MetricSums()
        return {**means, "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def state_dict(self) -> dict[str, Any]:
        """As one rank alone would have it; where layers are sharded, all ranks must ask."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {
            "optimizer": whole_state(self.optimizer.state_dict()),
            "precision": self.precision.state_dict(),
            **scheduler,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_like(state["optimizer"], self.optimizer))
        self.precision.load_state_dict(state["precision"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def call(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call one hook of every callback, in their order; a plain Lightning callback lacks those of RL."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is not None:
            method(*args)


def _unpack(configured: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Lightning's two ways to return an optimizer: alone, or in a dict with its scheduler."""
    if isinstance(configured, dict):
        return configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    return configured, None


class MetricSums:
    """Metrics of one iteration, summed on the device so that no micro-batch waits for the host."""

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self.done: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, outputs: dict[str, Tensor]) -> None:
        """One micro-batch."""
        for name, value in outputs.items():
            value = value.detach()
            before = self.step.get(name, torch.zeros_like(value))
            self.step[name] = torch.maximum(before, value) if name in MAXIMA else before + value

    def end_step(self, grad_norm: Tensor, is_finite: bool) -> None:
        """One optimizer step is complete; of one that was left out, the numbers would spoil the means."""
        self.done["skipped_steps"].append(torch.tensor(float(not is_finite)))
        if is_finite:
            for name, value in {**self.step, "grad_norm": grad_norm}.items():
                self.done[name].append(value)
        self.step = {}

    def means(self, fabric: Fabric) -> dict[str, float]:
        """Per step mean, over the steps that reported the metric; the number of steps that were left out."""
        n_skipped = float(sum(self.done.pop("skipped_steps", [])))
        found = {name: torch.stack(values).float().mean() for name, values in self.done.items()}
        if fabric.world_size > 1:
            # Each rank holds its part of a sum; the norm is that of the averaged gradients on each.
            kinds = {"max": MAXIMA, "sum": found.keys() - {*MAXIMA, "grad_norm"}}
            for kind, names in kinds.items():
                chosen = sorted(found.keys() & set(names))
                if chosen:
                    values = torch.stack([found[name] for name in chosen])
                    found |= dict(zip(chosen, fabric.all_reduce(values, reduce_op=kind), strict=True))
        return {**as_floats(found), "skipped_steps": n_skipped}
