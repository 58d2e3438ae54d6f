"""Hooks of the training loop, and a check for callbacks with unknown hooks."""

from collections.abc import Iterable
from difflib import get_close_matches

from lightning import Callback

from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutSplit
from lit_rlkv.modules.base import LossTerm, PolicyModule, StepOutputs, Terms
from lit_rlkv.types import TrainBatch


class RLCallback(Callback):
    """Base class of callbacks with hooks for reinforcement learning.

    A plain `lightning.Callback` subclass is accepted too. Of Lightning's hooks the loop calls, with None for
    the trainer:

    - `on_fit_start(trainer, pl_module)`: once, before the first iteration; `pl_module` is being trained.
    - `on_before_optimizer_step(trainer, pl_module, optimizer)`: after the backward passes of each step.
    - `on_fit_end(trainer, pl_module)`: once, after the last iteration.
    - `on_exception(trainer, pl_module, exception)`: when training fails or is interrupted.
    """

    n_graphs: int = 0
    """Forwards with gradients that its loss term adds to a pass; all wait for their backward together."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Roles besides the policy that the callback uses, for example `("reference",)`."""
        return ()

    def on_phase_start(self, phase: str, iteration: int) -> None:
        """Called before a phase: rollout, score, reward or update; `iteration` counts from 0."""

    def on_phase_end(self, phase: str, iteration: int) -> None:
        """Called after a phase; the device may still be busy."""

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        """Called at the start of a phase with `n_done` = 0, and each time that a part of it is done.

        The units are tokens in rollout (a response that ends early counts in full), responses in score, calls
        of reward functions in reward, callbacks in diagnostics, and optimizer steps in update. A part of a
        callback or step is a fraction.
        """

    def on_rollout_end(self, experience: Experience) -> None:
        """Called after sampling, scoring and rewards, before the first update."""

    def on_update_start(self, experience: Experience, split: RolloutSplit) -> None:
        """Called right before the first optimizer step on a rollout.

        `split(experience, n)` splits it into n parts of complete groups, with the denominators of one
        optimizer step on the full rollout: the gradients of the parts sum to the gradient of that step.
        """

    def loss_terms(
        self, module: PolicyModule, batch: TrainBatch, outputs: StepOutputs
    ) -> tuple[Terms, Terms]:
        """Called in each micro-batch; returns terms to add to its loss, and metrics to log."""
        return {}, {}

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        """Called after the last update; may add to `metrics`; `iteration` counts from 1."""


HOOKS = (
    "on_fit_start",
    "on_phase_start",
    "on_phase_end",
    "on_phase_progress",
    "on_rollout_end",
    "on_update_start",
    "on_before_optimizer_step",
    "on_iteration_end",
    "on_fit_end",
    "on_exception",
)
"""Hooks that the loop calls, in order."""
TERMS = "loss_terms"
NEVER_CALLED = ("setup", "teardown", "state_dict", "load_state_dict")
"""Lightning's hooks for a trainer's state, which the loop does not call."""


def loss_terms_of(callbacks: Iterable[Callback]) -> list[LossTerm]:
    """Return the `loss_terms` hooks of the callbacks that define it."""
    hooks = [getattr(callback, TERMS) for callback in callbacks if hasattr(callback, TERMS)]
    return [hook for hook in hooks if getattr(hook, "__func__", None) is not RLCallback.loss_terms]


def check_hooks(callbacks: Iterable[Callback]) -> None:
    """Check that the loop calls every hook of the callbacks.

    Raises:
        TypeError: a hook is unknown, for example misspelt, or an object is no callback.
    """
    for callback in callbacks:
        own = type(callback)
        if not isinstance(callback, Callback):
            raise TypeError(f"a callback must derive from lightning.Callback, got {own.__name__}")
        for name in dir(own):
            is_overridden = getattr(own, name) is not getattr(Callback, name, None)
            is_meant = not name.startswith("_") and get_close_matches(name, [TERMS], cutoff=0.9)
            is_hook = name.startswith("on_") or name in NEVER_CALLED or is_meant
            if is_hook and is_overridden and name not in (*HOOKS, TERMS):
                raise TypeError(
                    f"{own.__name__}.{name} is never called; hooks are {', '.join(HOOKS)} and {TERMS}"
                )
