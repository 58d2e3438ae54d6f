"""Backbones with layers sharded over the ranks (FSDP2), for models that do not fit one device.

Embeddings, output head, last norm and scalar heads are not sharded: they are small compared with the layers,
log-probs read the output head in chunks, and tied weights need no special case.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR, over_ranks

FAST = ("foreach", "fused")
"""Options of an optimizer that step many parameters at once."""


class ShardedStrategy(ModelParallelStrategy):
    """Strategy of Fabric for modules that `ShardedLayers` has sharded before.

    Fabric's own strategy shards at setup, but a policy samples before that. Collectives wait for all
    forwards.
    """

    def __init__(self, n_ranks: int, *, keeps_whole: bool) -> None:
        super().__init__(_unchanged, data_parallel_size=n_ranks, tensor_parallel_size=1)
        self.keeps_whole = keeps_whole

    def all_reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        FORWARD_COORDINATOR.wait()
        return super().all_reduce(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        FORWARD_COORDINATOR.wait()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        FORWARD_COORDINATOR.wait()
        return super().broadcast(obj, src)


def _unchanged(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


class ShardedLayers:
    """Shards the layers of a backbone evenly over the ranks, and gathers each for its computation.

    Args:
        backbone: the model with its adapters, on any device; all other tensors are moved to `device`.
        root: the module of the backbone that calls the layers, each once and in this order.
        computes_in: dtype of gathered weights, if it differs from that of the shards.
        keeps_whole: keep layers gathered after a decode step until another kind of forward or collective, so
            that a rollout gathers them once.
    """

    def __init__(
        self,
        backbone: nn.Module,
        root: nn.Module,
        layers: list[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        computes_in: torch.dtype | None = None,
        keeps_whole: bool = False,
    ) -> None:
        inside = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
        for tensor in (*backbone.parameters(), *backbone.buffers()):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
        is_low = torch.bfloat16 in (computes_in, next(backbone.parameters()).dtype)
        precision = MixedPrecisionPolicy(
            param_dtype=computes_in,
            reduce_dtype=torch.float32 if is_low else None,
            cast_forward_inputs=False,  # autocast decides the dtype of each operation
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(
            root, mesh=mesh, ignored_params={p for p in root.parameters() if not isinstance(p, DTensor)}
        )
        self.layers = [cast(FSDPModule, layer) for layer in layers]
        self.keeps_whole = keeps_whole
        # By default a layer's backward prefetches the layer used before it, which may belong to another
        # forward, a different one on each rank.
        for number, one in enumerate(self.layers):
            one.set_modules_to_backward_prefetch([self.layers[max(number - 1, 0)]])
        self.is_whole = False
        """True if layers are gathered between forwards; equal on all ranks."""
        self.passing, self.keeping = FORWARD_COORDINATOR.add(self._pass), FORWARD_COORDINATOR.add(self._keep)
        FORWARD_COORDINATOR.on_exchange(self._release)
        root.register_forward_pre_hook(self._ask, with_kwargs=True)

    def _ask(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keeps = self.keeps_whole and bool(kwargs.get("use_cache"))
        if keeps and self.is_whole:
            return  # nothing to communicate
        FORWARD_COORDINATOR.ask(self.keeping if keeps else self.passing)
        for layer in self.layers:
            layer.set_reshard_after_forward(not keeps, recurse=False)
        self.is_whole = keeps

    def _keep(self) -> None:
        """Gather the layers as a forward does."""
        for layer in self.layers:
            layer.unshard()
        self.is_whole = True

    def _pass(self) -> None:
        for layer in self.layers:
            layer.unshard()
            layer.reshard()
        self.is_whole = False

    def _release(self) -> None:
        for layer in self.layers:
            layer.reshard()
        self.is_whole = False


def gather_full(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a whole on the CPU of rank 0, empty on other ranks; others unchanged.

    Every rank must call it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    found = tensor.full_tensor()
    return found.cpu() if dist.get_rank() == 0 else torch.empty(0)


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor as another one of the same shape is sharded."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def gather_full_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the unsharded state of an optimizer on rank 0; every rank must call it."""
    return _converted(state, lambda number, value: gather_full(value))


def shard_state_like(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Shard the state of whole parameters for an optimizer; its `foreach` and `fused` options stay."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = [
        saved | {name: group[name] for name in FAST if name in group}
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return _converted(state, lambda number, value: shard_like(value, own[number])) | {"param_groups": groups}


def _converted(state: dict[str, Any], convert: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    per_parameter = {
        number: {
            name: convert(number, value) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return state | {"state": per_parameter}


def disable_foreach_for_mixed_tensors(optimizer: Optimizer) -> None:
    """Turn off `foreach` and `fused` if only some parameters are sharded, which these cannot mix."""
    for group in optimizer.param_groups:
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
            group.update({name: False for name in FAST if name in group})


def average_whole_gradients(module: nn.Module) -> None:
    """Average the gradients of unsharded parameters over the ranks; FSDP2 averages the others."""
    found = [p.grad for p in module.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in found):  # in the same order on all ranks
        mine = [gradient for gradient in found if gradient.dtype == dtype]
        sums = over_ranks(torch.cat([gradient.flatten() for gradient in mine]))
        means = torch.split(sums / dist.get_world_size(), [gradient.numel() for gradient in mine])
        for gradient, mean in zip(mine, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def clip_gradients(module: nn.Module, max_norm: float | int) -> Float[Tensor, ""]:
    """Clip gradients of sharded and unsharded parameters by their global norm, and return that norm.

    `torch.nn.utils.clip_grad_norm_` cannot mix both kinds.
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    common = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    zero = next(module.parameters()).new_zeros((), dtype=torch.float32)
    norm = (over_ranks(_sum_of_squares(parts, zero)) + _sum_of_squares(common, zero)).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*parts, *common):
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def _sum_of_squares(tensors: list[Tensor], zero: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the sum of squares, in float32 or better."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in tensors
    ]
    return torch.stack([zero, *norms]).square().sum() if norms else zero
