"""The training loop and the optimizer step of SFT and of every RL algorithm."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning import Callback
from lightning.fabric import Fabric
from lightning.fabric.plugins import HalfPrecision
from torch import Tensor, nn

from lit_rlkv.diagnostics.step_metrics import GRAD_NORM, MetricSums, checked_metrics
from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import (
    average_whole_gradients,
    clip_gradients,
    disable_foreach_for_mixed_tensors,
    gather_full_state,
    shard_state_like,
)
from lit_rlkv.interrupts import InterruptedRunError, Interruption
from lit_rlkv.non_finite import NonFiniteGuard


@dataclass(frozen=True)
class TrainState:
    """The state of training between two iterations, without the parameters."""

    iteration: int
    """Completed iterations."""
    metrics: Mapping[str, float]
    """Metrics of the last iteration; empty before the first."""
    data_state: dict[str, Any]
    learner_state: Callable[[], dict[str, Any]]
    is_last: bool
    """True if this process trains no further."""


def train(
    fabric: Fabric,
    module: L.LightningModule,
    datamodule: L.LightningDataModule,
    *,
    callbacks: Sequence[Callback],
    n_iterations: int,
    first_iteration: int = 0,
    learner_state: dict[str, Any] | None = None,
    max_grad_norm: float | None,
    save: Callable[[TrainState], None] = lambda state: None,
    update_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    interruption: Interruption | None = None,
) -> None:
    """Run iterations `first_iteration` to `n_iterations`; each takes one dataloader of the datamodule.

    For RL, `train_dataloader()` samples from the current policy. An interrupted iteration can be thrown away,
    because nothing that is saved changes before its first update.

    Args:
        learner_state: optimizer state of the checkpoint to resume from.
        save: called between iterations.
        update_context: entered around the updates of an iteration, for example to explain their errors.
        interruption: delivers signals before or after the updates, never in between.

    Raises:
        NonFiniteError: too many consecutive non-finite gradients.
        InterruptedRunError: a signal ended the run; `save` was called with its last complete state.
    """
    # 1. set up
    interruption = interruption or Interruption()
    learner = Learner(fabric, module, callbacks, max_grad_norm, learner_state)
    metrics: dict[str, float] = {}
    call(callbacks, "on_fit_start", None, module)
    with report_exception(callbacks, module), interruption.deferred():
        for iteration in range(first_iteration, n_iterations):
            started_at = time.perf_counter()
            data_state = datamodule.state_dict()
            # 2. data: for RL this samples, scores and rewards
            try:
                # On several ranks a signal waits, or the other ranks would wait for this one.
                with fabric.autocast(), interruption.immediate(fabric.world_size == 1):
                    loader = fabric.setup_dataloaders(datamodule.train_dataloader())
                interruption.raise_if_requested(fabric)
            except InterruptedRunError:
                save(TrainState(iteration, metrics, data_state, learner.state_dict, is_last=True))
                raise
            # 3. updates
            loaded_at = time.perf_counter()
            call(callbacks, "on_phase_start", "update", iteration)
            with update_context():
                for index, batch in enumerate(loader):
                    if index == 0:
                        call(callbacks, "on_phase_progress", "update", 0, batch.n_steps)
                    if module.on_train_batch_start(batch, index) == -1:
                        learner.skip(batch.n_steps + 1 - math.ceil(batch.n_steps_done))
                        break  # Lightning's protocol to skip the rest of a dataloader
                    learner.learn(batch, index)
                    call(callbacks, "on_phase_progress", "update", batch.n_steps_done, batch.n_steps)
            # Free this rollout before the next one is sampled.
            batch = None
            del loader
            call(callbacks, "on_phase_end", "update", iteration)
            # 4. report and save
            metrics = learner.metrics()
            metrics["time/data"] = loaded_at - started_at
            metrics["time/update"] = time.perf_counter() - loaded_at
            for callback in callbacks:
                call([callback], "on_iteration_end", iteration + 1, n_iterations, metrics)
                metrics.update({name: float(one) for name, one in checked_metrics(callback, metrics).items()})
            is_last = interruption.is_requested(fabric) or iteration + 1 == n_iterations
            save(TrainState(iteration + 1, metrics, datamodule.state_dict(), learner.state_dict, is_last))
            # A signal that arrived since then is handled when all ranks ask again.
            interruption.raise_if_agreed()
    call(callbacks, "on_fit_end", None, module)


@contextmanager
def report_exception(callbacks: Sequence[Callback], module: L.LightningModule) -> Iterator[None]:
    """Call `on_exception` of every callback before an exception propagates, Ctrl-C included."""
    try:
        yield
    except BaseException as error:
        call(callbacks, "on_exception", None, module, error)
        raise


class _Unconverted:
    """Wraps a batch so that Fabric passes it on unchanged; it refuses to convert frozen dataclasses."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class _Step(nn.Module):
    """Makes `training_step` the forward of a module, because Fabric and DDP wrap forward."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, wrapped: _Unconverted, index: int) -> dict[str, Tensor]:
        return cast("dict[str, Tensor]", self.module.training_step(wrapped.batch, index))


class Learner:
    """A module with its optimizer: backward passes, gradient clipping, optimizer steps, their metrics.

    A step with a non-finite gradient is skipped and counted in the metric `skipped_steps`.

    Args:
        module: in a process group it must have `idle_parameters`, as all of `lit_rlkv.modules` have.
        max_grad_norm: gradients are clipped to this norm; None: not clipped.
        state: to resume from.

    Raises:
        ValueError: Fabric's precision would cast the module's parameters to 16 bits.
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
                f"Fabric(precision={fabric.strategy.precision.precision!r}) would cast adapters, heads and "
                "buffers too; load the backbone in that precision and keep Fabric at 32-true"
            )
        FORWARD_COORDINATOR.wait()  # an optimizer must not take parameters of a gathered layer
        self.is_sharded = is_sharded(module)
        configured, self.scheduler = _unpack(module.configure_optimizers())
        disable_foreach_for_mixed_tensors(configured)
        # Sharded modules must be set up before their optimizer.
        self.model = fabric.setup_module(_Step(module))
        self.optimizer = cast("torch.optim.Optimizer", fabric.setup_optimizers(configured))
        self.precision = fabric.strategy.precision
        self.guard = NonFiniteGuard()
        self._learners: set[str] = set()
        """Roles that learn in the current step."""
        self.sums = MetricSums()
        if state is not None:
            self.load_state_dict(state)

    def learn(self, batch: Any, index: int) -> None:
        """Run one micro-batch forward and backward, and the optimizer step if `batch.ends_step`."""
        fabric = self.fabric
        # Sharded layers reduce gradients after each micro-batch, so that no rank holds full gradients.
        with fabric.no_backward_sync(self.model, enabled=not batch.ends_step and not self.is_sharded):
            outputs = self.model(_Unconverted(batch), index)
            FORWARD_COORDINATOR.wait()  # the backward pass communicates too
            # Losses are divided by global counts, but DDP averages gradients over ranks.
            fabric.backward(outputs["loss"] * fabric.world_size)
        self.sums.add(outputs)
        self._learners |= {*batch.learners}
        if batch.ends_step:
            self._step()

    def skip(self, n_steps: int) -> None:
        """Leave out optimizer steps; the learning rate follows its schedule as if they were done."""
        if self.scheduler is not None:
            for _ in range(n_steps):
                self.scheduler.step()

    def _step(self) -> None:
        if dist.is_available() and dist.is_initialized():
            # Their reduced gradients are zeros, and an optimizer would still apply momentum and decay.
            idle = cast("Callable[[set[str]], list[nn.Parameter]]", self.module.idle_parameters)
            for parameter in idle(self._learners):
                parameter.grad = None
        self._learners = set()
        if self.is_sharded:
            average_whole_gradients(self.module)
        self.sums.add(self._named_norms())
        norm = self._clip()
        scaler = getattr(self.precision, "scaler", None)
        loss_scale = 1.0 if scaler is None else scaler.get_scale()
        is_finite = self.guard.is_step_allowed(norm, self.sums.step, loss_scale)
        # A float16 grad scaler skips the step itself and lowers its scale.
        if is_finite or scaler is not None:
            call(self.callbacks, "on_before_optimizer_step", None, self.module, self.optimizer)
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.sums.end_step(norm, is_finite)

    def _clip(self) -> Tensor:
        """Clip the gradients and return their global norm before clipping."""
        if self.is_sharded:
            return clip_gradients(self.module, self.max_grad_norm)
        norm = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=self.max_grad_norm, error_if_nonfinite=False
        )
        assert norm is not None  # it is None only when clipping by value
        return norm

    def _named_norms(self) -> dict[str, Tensor]:
        """Return the gradient norms, before clipping, of the optimizer's parameter groups with a `name`."""
        named = {group["name"]: group["params"] for group in self.optimizer.param_groups if "name" in group}
        gradients = {name: [p.grad for p in some if p.grad is not None] for name, some in named.items()}
        scaler = getattr(self.precision, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        norms = {name: nn.utils.get_total_norm(some) / scale for name, some in gradients.items() if some}
        return {f"{name}/{GRAD_NORM}": norm for name, norm in norms.items()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all steps since the last call."""
        means, self.sums = self.sums.means(self.fabric), MetricSums()
        return {**means, "learning_rate": float(self.optimizer.param_groups[0]["lr"])}

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded state; with sharded layers every rank must call this."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {
            "optimizer": gather_full_state(self.optimizer.state_dict()),
            "precision": self.precision.state_dict(),
            **scheduler,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(shard_state_like(state["optimizer"], self.optimizer))
        self.precision.load_state_dict(state["precision"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def call(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call one hook of every callback in order; a plain Lightning callback lacks the RL hooks."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is not None:
            method(*args)


def _unpack(configured: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return optimizer and scheduler from either form that `configure_optimizers` may return."""
    if isinstance(configured, dict):
        return configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    return configured, None
