"""Loaded backbones to the ranks of a run, a part of each layer to each of them."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.config import ConfigError
from lit_rlkv.distributed.sharding import ShardedLayers, ShardedStrategy
from lit_rlkv.kernels.backend import using
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.models.hydra import checkpointed_layers
from lit_rlkv.models.replay import dense_evicted_at
from lit_rlkv.runs.context import RunContext


def shard(parts: RunContext, backbone: PreTrainedModel) -> None:
    """Move a backbone, with its adapters, to where it computes; where nothing is sharded it is there already.

    Raises:
        ConfigError: a forward of it does not go through layers of transformers' own kind, once each.
    """
    strategy = parts.fabric.strategy
    if not isinstance(strategy, ShardedStrategy):
        return
    layers = layers_in_order(backbone)
    within = {one for layer in layers for one in layer.modules() if one is not layer}
    if not layers or len({*layers}) < len(layers) or within & {*layers}:
        raise ConfigError(
            f"fabric.strategy=fsdp2 shards a model layer by layer, and {type(backbone).__name__} does not go "
            "through layers once each; use fabric.strategy=ddp"
        )
    ShardedLayers(
        backbone,
        backbone.base_model,
        layers,
        strategy.device_mesh["data_parallel"],
        parts.fabric.device,
        computes_in=torch.bfloat16 if parts.cfg.fabric.precision == "bf16-mixed" else None,
        keeps_whole=strategy.keeps_whole,
    )


@torch.no_grad()
def layers_in_order(backbone: PreTrainedModel) -> list[nn.Module]:
    """The layers that a forward of text calls, as often as it does: not those for images, say."""
    called: list[nn.Module] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        called.append(layer)

    hooks = [layer.register_forward_pre_hook(note) for layer in checkpointed_layers(backbone)]
    input_ids = torch.zeros((1, 2), dtype=torch.long, device=backbone.device)
    attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
    try:
        with using("reference"):
            hidden_states(
                backbone,
                input_ids,
                token_positions(attention_mask),
                evicted_at=dense_evicted_at(attention_mask),
            )
    finally:
        for hook in hooks:
            hook.remove()
    return called
