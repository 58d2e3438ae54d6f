"""The one training loop: Hydra-SFT and every RL algorithm run through it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning import Callback
from lightning.fabric import Fabric
from torch import Tensor

MAXIMA = ("kv/replay_gap",)
"""Metrics of which the largest counts; all others add up over micro-batches and are averaged over steps."""


def train(
    fabric: Fabric,
    module: L.LightningModule,
    datamodule: L.LightningDataModule,
    *,
    callbacks: Sequence[Callback],
    n_iterations: int,
    first_iteration: int = 0,
    optimizer_state: dict[str, Any] | None = None,
    max_grad_norm: float,
    save: Callable[[int, dict[str, Any]], None] | None = None,
) -> None:
    """Run iterations `first_iteration` to `n_iterations`, each one loader of the datamodule.

    A loader may sample from the policy as it is now; that happens when it is asked for. `save` gets the
    number of iterations done and the optimizer's state after each of them.
    """
    # 1. set up
    configured = module.configure_optimizers()
    optimizer, scheduler = _unpack(configured)
    model, optimizer = fabric.setup(module, optimizer)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(optimizer_state["scheduler"])
    call(callbacks, "on_fit_start", None, module)
    with reporting_failure(callbacks, module):
        for iteration in range(first_iteration, n_iterations):
            started_at = time.perf_counter()
            sums = MetricSums()
            # 2. data: for RL this is rollout, reward and credit
            with fabric.autocast():
                loader = fabric.setup_dataloaders(datamodule.train_dataloader())
            loaded_at = time.perf_counter()
            call(callbacks, "on_phase_start", "update", iteration)
            for index, batch in enumerate(loader):
                if module.on_train_batch_start(batch, index) == -1:
                    break  # Lightning's way to leave out the rest of a loader
                # 3. loss and gradient
                ends_step = getattr(batch, "ends_step", True)
                with fabric.no_backward_sync(model, enabled=not ends_step):
                    # Fabric enters autocast by itself only where a strategy wraps the module.
                    with fabric.autocast():
                        outputs = model.training_step(batch, index)
                    fabric.backward(outputs["loss"])
                sums.add(outputs)
                # 4. update
                if ends_step:
                    norm = fabric.clip_gradients(
                        model, optimizer, max_norm=max_grad_norm, error_if_nonfinite=False
                    )
                    assert norm is not None  # None is for clipping by value
                    call(callbacks, "on_before_optimizer_step", None, module, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                    if scheduler is not None:
                        scheduler.step()
                    sums.end_step(grad_norm=norm)
            # Let go of this rollout before the next one is sampled.
            batch = outputs = None
            del loader
            call(callbacks, "on_phase_end", "update", iteration)
            # 5. report and save
            metrics = sums.means()
            metrics["learning_rate"] = optimizer.param_groups[0]["lr"]
            metrics["time/data"] = loaded_at - started_at
            metrics["time/update"] = time.perf_counter() - loaded_at
            call(callbacks, "on_iteration_end", iteration + 1, n_iterations, metrics)
            if save is not None:
                state = {"optimizer": optimizer.state_dict()}
                save(
                    iteration + 1,
                    state | ({} if scheduler is None else {"scheduler": scheduler.state_dict()}),
                )
    call(callbacks, "on_fit_end", None, module)


@contextmanager
def reporting_failure(callbacks: Sequence[Callback], module: L.LightningModule) -> Iterator[None]:
    """Let callbacks clean up before an exception goes on, Ctrl-C included."""
    try:
        yield
    except BaseException as error:
        call(callbacks, "on_exception", None, module, error)
        raise


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
    """Metrics of one iteration, summed on the device so that no step waits for the host."""

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self.done: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, outputs: dict[str, Tensor]) -> None:
        """One micro-batch."""
        for name, value in outputs.items():
            value = value.detach()
            before = self.step.get(name, torch.zeros_like(value))
            self.step[name] = torch.maximum(before, value) if name in MAXIMA else before + value

    def end_step(self, grad_norm: Tensor) -> None:
        """One optimizer step is complete."""
        for name, value in {**self.step, "grad_norm": grad_norm}.items():
            self.done[name].append(value)
        self.step = {}

    def means(self) -> dict[str, float]:
        """Per step mean, over the steps that reported the metric."""
        return {name: float(torch.stack(values).float().mean()) for name, values in self.done.items()}
