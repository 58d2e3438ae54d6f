"""Memory of a run: bytes by kind, the peak of each phase, and the largest batch under a limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hydra_parts.runs import Run
from live_bytes import CudaBytes, LiveBytes, Meter, storage_bytes
from torch import Tensor, nn

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import LAYOUTS

PHASES = {"rollout": "sampling", "score": "scoring", "update": "update"}
"""Those of an iteration that are told apart, by their names here."""


@dataclass(frozen=True)
class Phase:
    """The peak of one part of an iteration."""

    peak_bytes: int
    gradient_bytes: int
    """Bytes of the peak that finished gradients hold."""


@dataclass
class Held:
    """Bytes by kind, each storage counted once, and the peak of each phase."""

    weights: int
    adapters: int
    heads: int
    optimizer: int = 0
    gradients: int = 0
    """All of them, as the optimizer's step needs them."""
    kv: int = 0
    """The cache of the whole batch; alive while it is sampled."""
    phases: dict[str, Phase] = field(default_factory=dict)

    @property
    def resident(self) -> int:
        """Return the bytes that no phase frees."""
        return self.weights + self.adapters + self.heads + self.optimizer

    @property
    def peak(self) -> int:
        return max(phase.peak_bytes for phase in self.phases.values())


def held_by(module: nn.Module) -> Held:
    """The parameters of a module by kind."""
    kinds: dict[str, list[Tensor]] = {"weights": [], "adapters": [], "heads": []}
    for name, parameter in module.named_parameters():
        kind = "heads" if name.startswith("roles.heads.") else "adapters" if "lora_" in name else "weights"
        kinds[kind].append(parameter)
    return Held(**{kind: storage_bytes(tensors) for kind, tensors in kinds.items()})


def n_backbones(roles: Roles) -> float:
    """Bytes of all base weights, each storage counted once, over those of one backbone."""
    every, one = (
        [p for name, p in module.named_parameters() if "lora_" not in name]
        for module in (roles.backbones, roles.backbone("policy"))
    )
    return storage_bytes(every) / storage_bytes(one)


def check_backbones(layout: str, roles: Roles) -> None:
    """Refuse to measure a layout that holds more or fewer backbones than it is said to.

    Raises:
        ValueError: naming the layout and what it holds.
    """
    said, held = len(set(LAYOUTS[layout].backbone.values())), n_backbones(roles)
    if held != said:
        raise ValueError(
            f"{layout} holds {held:g} backbones by the storages of its parameters, but should hold {said}; "
            "its figures would not be those of the layout: mend how Roles loads or shares them"
        )


class Watch(RLCallback):
    """Fills in what a run holds while it goes on; the last iteration counts."""

    def __init__(self, module: nn.Module, meter: Meter) -> None:
        self.held = held_by(module)
        self.meter = meter
        self._gradients: dict[int, int] = {}
        self._peak, self._at_peak = 0, 0

    def on_gradient(self, parameter: Tensor) -> None:
        """Between two gradients their sum does not change, so that of a peak in between is known."""
        self._look()
        assert parameter.grad is not None
        self._gradients[id(parameter)] = parameter.grad.nbytes

    def _look(self) -> None:
        peak = self.meter.peak_bytes()
        if peak > self._peak:
            self._peak, self._at_peak = peak, sum(self._gradients.values())

    def on_phase_end(self, phase: str, iteration: int) -> None:
        """Keep the peak since the phase before, and begin anew; rewards are counted with the update."""
        if phase not in PHASES:
            return
        self._look()
        self.held.phases[PHASES[phase]] = Phase(self._peak, self._at_peak)
        self._peak, self._at_peak = 0, 0
        self.meter.reset_peak()
        if phase == "update":
            self._gradients.clear()

    def on_rollout_end(self, experience: Any) -> None:
        self.held.kv = experience.rollout.kv_bytes

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, Tensor)]
        self.held.gradients = storage_bytes(p.grad for p in parameters if p.grad is not None)
        self.held.optimizer = storage_bytes(states)


@contextmanager
def watched_gradients(module: nn.Module, listener: Callable[[Tensor], None]) -> Iterator[None]:
    """Each time a gradient is added to a parameter, the listener is called with the parameter."""
    trained = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(listener) for p in trained]
    yield
    for hook in hooks:
        hook.remove()


def make_meter(module: nn.Module, device: str) -> Meter:
    """The meter of a device, with the module's parameters and buffers in its count."""
    existing = list(chain(module.parameters(), module.buffers()))
    return CudaBytes(existing) if device == "cuda" else LiveBytes(existing)


def measure_held(run: Run, batch: int) -> Held:
    """Two iterations; the second has the optimizer's state from its start, as all later ones do."""
    with make_meter(run.module, run.setting.device) as meter:
        watch = Watch(run.module, meter)
        with watched_gradients(run.module, watch.on_gradient):
            run.train(batch, 2, watch)
    return watch.held


def largest_fitting(peak_of: Callable[[int], int], limit: int, guess: int) -> int:
    """The largest batch whose peak does not exceed the limit, 0 if none; peaks must grow with the batch.

    Two measurements where the guess is right: steps double away from it until one batch fits and one does
    not, and the gap between them is halved.
    """
    fits, fails, step = 0, None, 1
    candidate = max(guess, 1)
    while fails is None or fails - fits > 1:
        if peak_of(candidate) <= limit:
            fits, candidate = candidate, candidate + step
        else:
            fails, candidate = candidate, max(candidate - step, 1)
        step *= 2
        if fails is not None and fits > 0:
            candidate = (fits + fails) // 2
    return fits
