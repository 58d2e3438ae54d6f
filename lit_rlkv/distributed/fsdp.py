"""Recognize layers that FSDP shards, without Lightning: a rollout needs torch and transformers alone."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_sharded(module: nn.Module) -> bool:
    """True if any layer is sharded by FSDP, whether or not it is gathered now."""
    return any(isinstance(m, FSDPModule) for m in module.modules())
