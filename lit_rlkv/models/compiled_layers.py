"""Decode steps with the decoder layers compiled by torch.compile, for any transformers model as it is."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_rlkv.distributed.fsdp import is_sharded

VARIANTS_PER_LAYER = 8
"""Most variants of each layer, for other numbers of rows or another dtype; then a layer runs eagerly."""


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile has the C++ compiler that it needs on a CPU.

    Raises:
        ValueError: there is none.
    """
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler  # not at the top: slow, and rarely needed
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "rollout.compile_layers=true needs a C++ compiler, and none was found; install g++, or use "
            "rollout.compile_layers=false"
        ) from error


class CompiledLayers(AbstractContextManager[None]):
    """A `with` block in which the decoder layers of a model run compiled; it can be entered many times.

    torch.compile fuses the norms, rotations, activations and residuals between the products. The attention
    over the cache is left out. Compilation happens at the first forward, takes seconds per layer, and is kept
    for the life of the process. Results differ from those of eager layers by rounding.

    Raises:
        ValueError: the model is sharded, or has no decoder layers of transformers; or there is no compiler.
    """

    def __init__(self, model: nn.Module) -> None:
        if is_sharded(model):
            raise ValueError(
                "rollout.compile_layers=true cannot compile layers that are gathered at every step; use "
                "rollout.compile_layers=false with fabric.strategy=fsdp2"
            )
        self._layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not self._layers:
            raise ValueError(
                f"{type(model).__name__} has no decoder layers that rollout.compile_layers=true could "
                "compile; use rollout.compile_layers=false"
            )
        check_compiler(next(model.parameters()).device)
        self._compiled = [torch.compile(layer.forward, dynamic=False) for layer in self._layers]
        # A layer's index is a constant to the compiler, which therefore compiles the attention of each layer.
        n_variants = VARIANTS_PER_LAYER * len(self._layers)
        self._limits: Any = torch._dynamo.config.patch(
            recompile_limit=n_variants, accumulated_recompile_limit=2 * n_variants
        )

    def __enter__(self) -> None:
        self._limits.__enter__()
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer.forward = compiled

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)  # the method of the class again
        self._limits.__exit__(*error)
