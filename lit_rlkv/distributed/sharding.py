"""Backbones whose layers lie in shards on the ranks (FSDP2), for models that do not fit one device.

Embeddings, output head, last norm and scalar heads are whole on every rank: they are small beside the layers,
log-probs read the output head in chunks, and tied weights need no special case.
"""

from collections.abc import Callable, Iterator
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
"""Ways to step many parameters at once, by their names in an optimizer's groups."""


class ShardedStrategy(ModelParallelStrategy):
    """Fabric's strategy for FSDP2, where `ShardedLayers` has sharded before Fabric sees a module.

    A policy samples before it is trained. Ranks exchange nothing before all are done with their forwards.
    """

    def __init__(self, n_ranks: int, *, keeps_whole: bool) -> None:
        super().__init__(_as_it_is, data_parallel_size=n_ranks, tensor_parallel_size=1)
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


def _as_it_is(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


class ShardedLayers:
    """The layers of one backbone, each in equal parts on all ranks, and whole while it computes.

    Args:
        backbone: with its adapters, on any device; what is not in these layers goes whole to `device`.
        root: the module of it that calls the layers, each once and in this order.
        computes_in: what the weights are gathered in, if in another precision than theirs.
        keeps_whole: after a step of sampling, layers stay whole until another kind of forward or any other
            exchange, so that a rollout gathers them once.
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
        inside = {id(tensor) for layer in layers for tensor in _tensors(layer)}
        for tensor in _tensors(backbone):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
        is_low = torch.bfloat16 in (computes_in, next(backbone.parameters()).dtype)
        precision = MixedPrecisionPolicy(
            param_dtype=computes_in,
            reduce_dtype=torch.float32 if is_low else None,
            cast_forward_inputs=False,  # autocast knows better what to compute in which precision
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(
            root, mesh=mesh, ignored_params={p for p in root.parameters() if not isinstance(p, DTensor)}
        )
        self.layers: list[FSDPModule] = [cast(FSDPModule, layer) for layer in layers]
        self.keeps_whole = keeps_whole
        # By default a layer's backward prefetches the one that was used before it, which may have been in
        # another forward, and in another one on each rank.
        for number, one in enumerate(self.layers):
            one.set_modules_to_backward_prefetch([self.layers[max(number - 1, 0)]])
        self.is_whole = False
        """Between forwards; the same on all ranks, for it changes only where they agree."""
        self.passing, self.keeping = FORWARD_COORDINATOR.add(self._pass), FORWARD_COORDINATOR.add(self._keep)
        FORWARD_COORDINATOR.on_exchange(self._release)
        root.register_forward_pre_hook(self._ask, with_kwargs=True)

    def _ask(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keeps = self.keeps_whole and bool(kwargs.get("use_cache"))
        if keeps and self.is_whole:
            return  # there is nothing to exchange
        FORWARD_COORDINATOR.ask(self.keeping if keeps else self.passing)
        for layer in self.layers:
            layer.set_reshard_after_forward(not keeps, recurse=False)
        self.is_whole = keeps

    def _keep(self) -> None:
        """Gather the layers as a forward would, without the forward."""
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


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def gather_full(tensor: Tensor) -> Tensor:
    """The tensor itself; of one in shards all of it on the first rank's CPU, and on the others nothing.

    All ranks must ask.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    found = tensor.full_tensor()
    return found.cpu() if dist.get_rank() == 0 else torch.empty(0)


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor that every rank has whole, in shards where the other one is, if they are of one shape."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def gather_full_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as one rank alone would have it, on the first rank; all must ask."""
    return _converted(state, lambda number, value: gather_full(value))


def shard_state_like(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The reverse: the state of whole parameters, for an optimizer, which keeps its ways to step."""
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
    """Where some of its parameters are in shards, step them one by one: faster ways would mix both kinds."""
    for group in optimizer.param_groups:
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
            group.update({name: False for name in FAST if name in group})


def average_whole_gradients(module: nn.Module) -> None:
    """The mean over the ranks of the gradients of what is not in shards; of all others FSDP2 takes it."""
    found = [p.grad for p in module.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in found):  # in one order on all ranks
        mine = [gradient for gradient in found if gradient.dtype == dtype]
        sums = over_ranks(torch.cat([gradient.flatten() for gradient in mine]))
        means = torch.split(sums / dist.get_world_size(), [gradient.numel() for gradient in mine])
        for gradient, mean in zip(mine, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def clip_gradients(module: nn.Module, max_norm: float | int) -> Float[Tensor, ""]:
    """As `torch.nn.utils.clip_grad_norm_`, which takes only parameters of one kind.

    Returns:
        The norm of all gradients before, the same on every rank.
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
    """In float32 or better."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in tensors
    ]
    return torch.stack([zero, *norms]).square().sum() if norms else zero
