"""The hooks that our loop calls, declared once; a callback with any other one is refused at start-up."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from lightning import Callback

from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutSplit
from lit_rlkv.modules.base import LossTerm, PolicyModule, StepOutputs, Terms
from lit_rlkv.types import TrainBatch


class RLCallback(Callback):
    """Lightning's callback with the moments that only reinforcement learning has."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Roles beside the policy that the callback reads, for example `("reference",)`."""
        return ()

    def on_phase_start(self, phase: str, iteration: int) -> None:
        """Before a part of an iteration, which counts from 0: rollout, score, reward, and then update."""

    def on_phase_end(self, phase: str, iteration: int) -> None:
        """After it; the device may still be at work."""

    def on_rollout_end(self, experience: Experience) -> None:
        """After sampling and scoring; before the first update."""

    def on_update_start(self, experience: Experience, split: RolloutSplit) -> None:
        """Before the first update on a rollout. `split(experience, n)` cuts it into n parts of whole groups,
        all with the denominators of one optimizer step on the whole rollout, so that their gradients add up
        to that step's."""

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


TERMS = "loss_terms"
NEVER_CALLED = ("setup", "teardown", "state_dict", "load_state_dict")
"""Lightning's, which carry a trainer's state."""


def bound_hooks(callbacks: Iterable[Callback], name: str) -> list[Any]:
    """Return a hook of every callback that has it; a plain Lightning callback lacks the RL hooks."""
    return [getattr(callback, name) for callback in callbacks if hasattr(callback, name)]


def loss_terms_of(callbacks: Iterable[Callback]) -> list[LossTerm]:
    """The hooks of those that add to the loss; with none, the loss is the algorithm's own."""
    terms = bound_hooks(callbacks, TERMS)
    return [term for term in terms if getattr(term, "__func__", None) is not RLCallback.loss_terms]


def check_hooks(callbacks: Iterable[Callback], kind: type[Callback] = Callback) -> None:
    """Refuse callbacks with a method that nothing would ever call.

    Args:
        kind: what the loop expects of each of them.

    Raises:
        TypeError: a hook of another loop, one that is misspelt, such as `on_rolout_end`, or no such callback.
    """
    for callback in callbacks:
        own = type(callback)
        if not isinstance(callback, kind):
            raise TypeError(f"{own.__name__} is no {kind.__name__}; derive it from {kind.__module__}")
        for name in dir(own):
            is_overridden = getattr(own, name) is not getattr(Callback, name, None)
            is_meant = not name.startswith("_") and get_close_matches(name, [TERMS], cutoff=0.9)
            is_hook = name.startswith("on_") or name in NEVER_CALLED or is_meant
            if is_hook and is_overridden and name not in (*HOOKS, TERMS):
                raise TypeError(
                    f"{own.__name__}.{name} is never called; hooks are {', '.join(HOOKS)} and {TERMS}"
                )
