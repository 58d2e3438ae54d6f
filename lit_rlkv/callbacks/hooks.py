"""The hooks that our loop calls, declared once; a callback with any other one is refused at start-up."""

from collections.abc import Iterable

from lightning import Callback

from lit_rlkv.data.credit import Experience
from lit_rlkv.data.steps import Split
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.types import TrainBatch


class RLCallback(Callback):
    """Lightning's callback with the moments that only reinforcement learning has."""

    def on_phase_start(self, phase: str, iteration: int) -> None:
        """Before a part of an iteration, which counts from 0: rollout, score, reward, and then update."""

    def on_phase_end(self, phase: str, iteration: int) -> None:
        """After it; the device may still be at work."""

    def on_rollout_end(self, experience: Experience) -> None:
        """After sampling and scoring; before the first update."""

    def on_update_start(self, experience: Experience, split: Split) -> None:
        """Before the first update on a rollout. `split(experience, n)` cuts it into n parts of whole groups,
        each with the denominators of an optimizer step of its own, so that parts are independent estimates of
        one gradient."""

    def loss_terms(
        self, module: PolicyModule, batch: TrainBatch, outputs: StepOutputs
    ) -> tuple[Terms, Terms]:
        """Terms to add to the loss of this step, and metrics to log with it."""
        return {}, {}

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        """After the last update on a rollout, with all that was logged of it; `iteration` counts from 1."""


HOOKS = (
    "on_fit_start",
    "on_phase_start",
    "on_phase_end",
    "on_rollout_end",
    "on_update_start",
    "on_before_optimizer_step",
    "on_iteration_end",
    "on_fit_end",
    "on_exception",
)
"""All that our loop calls, in order; Lightning's own come with its own arguments, the trainer being None."""


def check_hooks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks with a method that nothing would ever call.

    Raises:
        TypeError: a hook of another loop, or one that is misspelt, such as `on_rolout_end`.
    """
    for callback in callbacks:
        for name in dir(type(callback)):
            is_overridden = getattr(type(callback), name) is not getattr(Callback, name, None)
            if name.startswith("on_") and is_overridden and name not in HOOKS:
                raise TypeError(
                    f"{type(callback).__name__}.{name} is never called; hooks are {', '.join(HOOKS)}"
                )
