"""The one training loop: Hydra-SFT and every RL algorithm run through it."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import lightning as L
import torch
from lightning import Callback
from lightning.fabric import Fabric
from lightning.fabric.plugins import HalfPrecision
from torch import Tensor, nn

from lit_rlkv.diagnostics.scalars import as_floats
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import (
    average_whole_gradients,
    clip_gradients,
    disable_foreach_for_mixed_tensors,
    state_like,
    whole_state,
)
from lit_rlkv.faults import InterruptedRunError, Interruption, NonFiniteGuard
from lit_rlkv.models.backbone import is_sharded
from lit_rlkv.runs.checkpoint import TrainState


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
    save: Callable[[TrainState], None] = lambda moment: None,
    learning: Callable[[], AbstractContextManager[None]] = nullcontext,
    interruption: Interruption | None = None,
) -> None:
    """Run iterations `first_iteration` to `n_iterations`, each one loader of the datamodule.

    A loader may sample from the policy as it is now; that happens when it is asked for. What it does may be
    thrown away: nothing that is saved changes before the first update.

    Args:
        learner_state: of a checkpoint to go on from.
        save: called between iterations.
        learning: a block around the updates of an iteration, which may explain their failures.
        interruption: of a run that may be asked to end, which it does before or after the updates.

    Raises:
        NonFiniteError: several optimizer steps in a row had no finite gradient.
        InterruptedRunError: the run was asked to end; `save` has had its last whole moment.
    """
    # 1. set up
    interruption = interruption or Interruption()
    learner = Learner(fabric, module, callbacks, max_grad_norm, learner_state)
    metrics: dict[str, float] = {}
    call(callbacks, "on_fit_start", None, module)
    with report_exception(callbacks, module), interruption.held():
        for iteration in range(first_iteration, n_iterations):
            started_at = time.perf_counter()
            data_state = datamodule.state_dict()
            # 2. data: for RL this is rollout, reward and credit
            try:
                # One rank that ends would leave the others waiting for it.
                with fabric.autocast(), interruption.granted(fabric.world_size == 1):
                    loader = fabric.setup_dataloaders(datamodule.train_dataloader())
                interruption.end_if_asked(fabric)
            except InterruptedRunError:
                save(TrainState(iteration, metrics, data_state, learner.state_dict, is_last=True))
                raise
            # 3. updates
            loaded_at = time.perf_counter()
            call(callbacks, "on_phase_start", "update", iteration)
            with learning():
                for index, batch in enumerate(loader):
                    if module.on_train_batch_start(batch, index) == -1:
                        break  # Lightning's way to leave out the rest of a loader
                    learner.learn(batch, index)
            # Let go of this rollout before the next one is sampled.
            batch = None
            del loader
            call(callbacks, "on_phase_end", "update", iteration)
            # 4. report and save
            metrics = learner.metrics()
            metrics["time/data"] = loaded_at - started_at
            metrics["time/update"] = time.perf_counter() - loaded_at
            call(callbacks, "on_iteration_end", iteration + 1, n_iterations, metrics)
            is_last = interruption.is_asked(fabric) or iteration + 1 == n_iterations
            save(TrainState(iteration + 1, metrics, datamodule.state_dict(), learner.state_dict, is_last))
            # A signal since then waits for the next time that all ranks ask.
            interruption.end_if_agreed()
    call(callbacks, "on_fit_end", None, module)


@contextmanager
def report_exception(callbacks: Sequence[Callback], module: L.LightningModule) -> Iterator[None]:
    """Let callbacks clean up before an exception goes on, Ctrl-C included."""
    try:
        yield
    except BaseException as error:
        call(callbacks, "on_exception", None, module, error)
        raise


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
        FORWARD_COORDINATOR.wait()  # no layer may be whole while an optimizer takes its parameters
        self.is_sharded = is_sharded(module)
        configured, self.scheduler = _unpack(module.configure_optimizers())
        disable_foreach_for_mixed_tensors(configured)
        # One after the other, as sharded modules must be.
        self.model = fabric.setup_module(_Step(module))
        self.optimizer = cast("torch.optim.Optimizer", fabric.setup_optimizers(configured))
        self.precision = fabric.strategy.precision
        self.guard = NonFiniteGuard()
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
            FORWARD_COORDINATOR.wait()  # a backward pass is an exchange too
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
        is_finite = self.guard.is_step_allowed(norm, self.sums.step, loss_scale)
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
