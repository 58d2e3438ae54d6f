"""Time, memory and flops of the phases of an iteration."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker
from transformers import PreTrainedModel

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.diagnostics.flops import FlopCosts, flop_costs, learner_work, peak_flops, rollout_work
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.adapters import active_adapter, lora_layers
from lit_rlkv.models.backbone import n_kv_heads, text_config
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.lm_head import model_body
from lit_rlkv.settings import PositiveNumber, dataclass

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to CLEAR_REFS, resets the peak to the current resident set (proc(5))."""


class MemoryMeter:
    """Reads torch's allocated memory on CUDA, and elsewhere on Linux the resident set of the process.

    The peak of the resident set is counted by the kernel. `reset_peak` also resets the peak that `getrusage`
    and `time` report.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._knows_peak = False

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Reset the peak to the current size."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._knows_peak = True
        except OSError:  # not Linux, or not permitted
            self._knows_peak = False

    def read(self) -> dict[str, int]:
        """Return bytes by name; sizes that this platform does not report are left out."""
        if self.is_cuda:
            return {
                "allocated": torch.cuda.memory_allocated(self.device),
                "peak": torch.cuda.max_memory_allocated(self.device),
            }
        status = STATUS.read_text() if STATUS.is_file() else ""
        kibibytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE))
        fields = {"resident": "VmRSS"} | ({"resident_peak": "VmHWM"} if self._knows_peak else {})
        return {name: int(kibibytes[field]) * 1024 for name, field in fields.items() if field in kibibytes}


class FlopCounter:
    """Counts flops from `start` to `stop`: each forward under an eviction table, and its backward pass.

    Recomputed forwards (checkpointing) do not count. The host waits for the device only when it reads the
    totals.
    """

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self._handles: list[RemovableHandle] = []
        self._adapted: dict[int, list[LoraLayer]] = {}
        """LoRA layers of each backbone, looked up once."""
        self._costs: dict[tuple[int, str | None], FlopCosts | None] = {}
        self._flops: list[Tensor] = []
        self._learned: list[Tensor] = []
        self._tracker = ModuleTracker()

    def start(self) -> None:
        """Reset the totals and start counting."""
        self._flops, self._learned, self._costs = [], [], {}
        for name in self.roles.backbones:
            backbone = self.roles.named_backbone(name)
            self._adapted[id(backbone)] = lora_layers(backbone)
            on_body, on_head = partial(self._on_body, backbone), partial(self._on_head, backbone)
            self._handles += [
                model_body(backbone).register_forward_hook(on_body, with_kwargs=True),
                backbone.get_output_embeddings().register_forward_hook(on_head),
            ]

    def stop(self) -> None:
        """Stop counting; the totals stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def flops(self) -> float | None:
        """Total flops; None if the costs of a model are unknown."""
        return None if None in self._costs.values() else float(sum(self._flops))  # one transfer

    @property
    def n_learned(self) -> float:
        """Tokens in backward passes; a token in two backward passes counts twice."""
        return float(sum(self._learned))

    def _on_body(
        self, backbone: PreTrainedModel, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if "replay" not in kwargs or self._tracker.is_bw:
            return
        table = kwargs["replay"].record.evicted_at
        work = learner_work(table, text_config(backbone).num_hidden_layers, n_kv_heads(backbone))
        costs = self._costs_now(backbone)
        if costs is not None:
            self._flops.append(costs.forward(work))
        hidden: Tensor = output.last_hidden_state
        if hidden.requires_grad:
            flops = [] if costs is None else [costs.backward(work)]

            def on_gradient(gradient: Tensor) -> None:
                self._flops += flops
                self._learned.append(work.n_tokens)

            # Not called if no loss depends on these states.
            hidden.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _on_head(self, backbone: PreTrainedModel, module: nn.Module, args: Any, logits: Tensor) -> None:
        costs = self._costs_now(backbone)
        if costs is None or self._tracker.is_bw:
            return
        n_positions = torch.tensor(logits.shape[:-1].numel())
        self._flops.append(n_positions * costs.forward_per_position)
        if logits.requires_grad:
            flops = n_positions * costs.backward_per_position
            logits.register_hook(lambda gradient: self._flops.append(flops))  # type: ignore[no-untyped-call]

    def _costs_now(self, backbone: PreTrainedModel) -> FlopCosts | None:
        """Return the costs of a backbone in its active role."""
        key = id(backbone), active_adapter(self._adapted[id(backbone)])
        if key not in self._costs:
            self._costs[key] = flop_costs(backbone)
        return self._costs[key]


@dataclass(eq=False)
class Performance(Diagnostic):
    """`time/*`, `memory/*` and `perf/*` of the phases of an iteration: rollout, score, reward, update.

    The host waits for the device at the start and end of each phase only. Each rank reports its own device.
    """

    name = "performance"
    peak_flops: PositiveNumber | None = None
    """peak flops per second of a device at the run's precision, such as 9.9e14, for the utilization; null:
    looks the device up, and of an unknown one the utilization is not logged"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seconds: dict[str, float] = {}
        self._started_at = 0.0
        self._is_looked_up = self.peak_flops is not None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self.meter = MemoryMeter(self.policy.roles.backbone("policy").device)
        self.passes = FlopCounter(self.policy.roles)

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if iteration % self.every != 0:
            return
        self.meter.wait()
        with self._timed():
            self.meter.reset_peak()
            if phase == "update":
                self.passes.start()
        self._started_at = time.perf_counter()

    def on_phase_end(self, phase: str, iteration: int) -> None:
        if iteration % self.every != 0:
            return
        self.meter.wait()
        self._seconds[phase] = time.perf_counter() - self._started_at
        with self._timed():
            self.scalars |= {f"memory/{phase}/{name}": value for name, value in self.meter.read().items()}
            if phase == "update":  # the loop logs the time
                self.passes.stop()
                self._add_speed(phase, self.passes.n_learned, self.passes.flops)
            else:
                self.scalars[f"time/{phase}"] = self._seconds[phase]

    def measure(self, experience: Experience) -> None:
        """Measure the speed of the rollout.

        Raises:
            ValueError: the data module does not call the phase hooks.
        """
        if "rollout" not in self._seconds:
            raise ValueError(
                "Performance saw no rollout phase and cannot time it; give RolloutDataModule "
                "callbacks=[diagnostic]"
            )
        n_sampled = int(experience.rollout.response_mask.sum())
        with acting_as(self.policy.roles, "policy") as backbone:
            costs = flop_costs(backbone)
        if not self._is_looked_up:  # for the precision of the matrix products
            device = self.meter.device
            is_autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if is_autocast else backbone.dtype
            self.peak_flops = peak_flops(device, dtype)
            self._is_looked_up = True
        flops = None
        if costs is not None:
            work, n_positions = rollout_work(experience.rollout, experience.group_size)
            flops = float(costs.forward(work)) + n_positions * costs.forward_per_position
        self._add_speed("rollout", n_sampled, flops)

    def _add_speed(self, phase: str, n_tokens: float | int, flops: float | None) -> None:
        elapsed_s = self._seconds[phase]
        self.scalars[f"perf/tokens_per_second/{phase}"] = n_tokens / elapsed_s
        if flops is None:
            return
        self.scalars[f"perf/tflops/{phase}"] = flops / elapsed_s / 1e12
        if self.peak_flops is not None:
            self.scalars[f"perf/mfu/{phase}"] = flops / elapsed_s / self.peak_flops
