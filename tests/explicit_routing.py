"""Experts given to the routers of transformers' models by own hooks and each family's published formula."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


def weights_of(config: PretrainedConfig, logits: Tensor, ids: Tensor) -> Tensor:
    """Weights [token, expert] of the given experts, from logits over all experts."""
    kind, logits = config.model_type, logits.float()
    if kind == "granitemoe":  # softmax over the chosen alone
        return logits.gather(1, ids).softmax(-1)
    if kind == "deepseek_v3":
        chosen = logits.sigmoid().gather(1, ids)
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20) if config.norm_topk_prob else chosen
        return chosen * config.routed_scaling_factor
    chosen = logits.softmax(-1).gather(1, ids)
    if kind == "deepseek_v2":
        return chosen * config.routed_scaling_factor
    is_normalised = kind == "mixtral" or config.norm_topk_prob
    return chosen / chosen.sum(1, keepdim=True) if is_normalised else chosen


def routers_by_name(model: PreTrainedModel) -> list[nn.Module]:
    """Routers in their order, by the name of their class."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


@contextmanager
def given_experts(model: PreTrainedModel, expert_ids: Tensor | None) -> Iterator[None]:
    """Within this block routers return the given experts [batch, router, expert, seq]; -1 is expert 0."""

    def route(ids: Tensor) -> Any:
        ids = ids.movedim(1, 2).flatten(0, 1).long().clamp(min=0)

        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, _ = output
            return logits, weights_of(model.config, logits, ids).to(weights.dtype), ids

        return hook

    with ExitStack() as stack:
        if expert_ids is not None:
            for router, ids in zip(routers_by_name(model), expert_ids.unbind(1), strict=True):
                stack.callback(router.register_forward_hook(route(ids)).remove)
        yield


@contextmanager
def own_choice(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list that a forward of one row fills with the experts [expert, seq] of each router."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(output[2].T)

    with ExitStack() as stack:
        for router in routers_by_name(model):
            stack.callback(router.register_forward_hook(note).remove)
        yield found


def perturb(model: PreTrainedModel, scale: float = 0.3) -> None:
    """Change every matrix by noise of so many of its own standard deviations, so that experts flip."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=scale * float(parameter.std()))
