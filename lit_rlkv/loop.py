"""The one training loop: Hydra-SFT and every RL algorithm run through it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning import Callback
from lightning.fabric import Fabric

from lit_rlkv.faults import InterruptedRunError, Interruption
from lit_rlkv.learner import Learner, call


@dataclass(frozen=True)
class Moment:
    """Training between two iterations: with the parameters, all that a checkpoint needs."""

    iteration: int
    """Iterations done."""
    metrics: Mapping[str, float]
    """Of the last one; empty before the first."""
    data_state: dict[str, Any]
    learner_state: Callable[[], dict[str, Any]]
    is_last: bool
    """Nothing comes after it in this process."""


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
    save: Callable[[Moment], None] = lambda moment: None,
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
    with reporting_failure(callbacks, module), interruption.held():
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
                save(Moment(iteration, metrics, data_state, learner.state_dict, is_last=True))
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
            save(Moment(iteration + 1, metrics, datamodule.state_dict(), learner.state_dict, is_last))
            # A signal since then waits for the next time that all ranks ask.
            interruption.end_if_agreed()
    call(callbacks, "on_fit_end", None, module)


@contextmanager
def reporting_failure(callbacks: Sequence[Callback], module: L.LightningModule) -> Iterator[None]:
    """Let callbacks clean up before an exception goes on, Ctrl-C included."""
    try:
        yield
    except BaseException as error:
        call(callbacks, "on_exception", None, module, error)
        raise
