"""Counts the flops of the passes that a learner really runs, whatever algorithm and loss terms ask for."""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.flops import Costs, costs_of, learner_work
from lit_rlkv.models.adapters import active_adapter, lora_layers
from lit_rlkv.models.backbone import n_kv_heads, text_config
from lit_rlkv.models.hydra import Roles


class PassCounter:
    """From `start` to `stop`: every forward under a eviction table, and every backward pass through it.

    A forward that a backward pass repeats (checkpointing) does not count. Nothing waits for the device until
    the totals are asked for.
    """

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self._handles: list[RemovableHandle] = []
        self._adapted: dict[int, list[LoraLayer]] = {}
        """Of each backbone, so that no chunk of the output head walks through the model."""
        self._costs: dict[tuple[int, str | None], Costs | None] = {}
        self._flops: list[Tensor] = []
        self._learned: list[Tensor] = []
        self._tracker = ModuleTracker()

    def start(self) -> None:
        """Forget what was counted, and look on from here."""
        self._flops, self._learned, self._costs = [], [], {}
        for name in self.roles.backbones:
            backbone = self.roles.named_backbone(name)
            self._adapted[id(backbone)] = lora_layers(backbone)
            of_body, of_head = partial(self._on_body, backbone), partial(self._on_head, backbone)
            self._handles += [
                backbone.base_model.register_forward_hook(of_body, with_kwargs=True),
                backbone.get_output_embeddings().register_forward_hook(of_head),
            ]

    def stop(self) -> None:
        """Look on no longer; the totals stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def flops(self) -> float | None:
        """None where they are not known."""
        return None if None in self._costs.values() else _total(self._flops)

    @property
    def n_learned(self) -> float:
        """Tokens that backward passes went through; one that two of them went through counts twice."""
        return _total(self._learned)

    def _on_body(
        self, backbone: PreTrainedModel, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if "evicted_at" not in kwargs or self._tracker.is_bw:
            return
        work = learner_work(
            kwargs["evicted_at"], text_config(backbone).num_hidden_layers, n_kv_heads(backbone)
        )
        costs = self._costs_now(backbone)
        if costs is not None:
            self._flops.append(costs.forward(work))
        hidden: Tensor = output.last_hidden_state
        if hidden.requires_grad:
            flops = [] if costs is None else [costs.backward(work)]

            def on_gradient(gradient: Tensor) -> None:
                self._flops += flops
                self._learned.append(work.n_tokens)

            # It is never called where no loss depends on these states.
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

    def _costs_now(self, backbone: PreTrainedModel) -> Costs | None:
        """Of a backbone in the role that it has in this forward."""
        key = id(backbone), active_adapter(self._adapted[id(backbone)])
        if key not in self._costs:
            self._costs[key] = costs_of(backbone)
        return self._costs[key]


def _total(counts: list[Tensor]) -> float:
    """Added up where they are, so that the host waits once."""
    return float(sum(counts))
