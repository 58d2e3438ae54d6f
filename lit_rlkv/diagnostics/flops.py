"""Floating point operations of a model by formula, as model flops utilisation counts them (arXiv:2204.02311).

A product of a weight matrix and the state of one token is 2 flops for each weight. Its backward pass is as
much again for the gradient of the state, and as much again for that of the weight, which a frozen one does
not need: so full training is 2 + 4 flops per weight and token, and LoRA 2 + 2 per frozen weight and 2 + 4 per
weight of the adapter. Attention is 2 products, 4·head_dim flops for each query, key that it sees and query
head; its backward pass is twice that, since nothing in it is frozen.

What is computed and not needed does not count: padding, masked pairs, layers run again by checkpointing, and
norms, activations and rotations, which are small beside products. Under LoRA nobody needs the gradient of
what the first layer reads, which the formula counts all the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.cache import live_keys, predicts
from lit_rlkv.models.adapters import active_adapter, lora_layers
from lit_rlkv.models.backbone import head_dim, n_kv_heads, optional_setting, text_config
from lit_rlkv.types import Rollout


@dataclass(frozen=True)
class Work:
    """What one forward has to do."""

    n_tokens: Int[Tensor, ""]
    """That are no padding."""
    n_pairs: Int[Tensor, ""]
    """Keys that a query sees, over all its queries, layers and KV heads."""


@dataclass(frozen=True)
class Costs:
    """Flops of a backbone in the role it has: of its body, and apart from it of its output head."""

    forward_per_token: int
    backward_per_token: int
    forward_per_pair: int
    """For each query, key that it sees and KV head; the backward pass is twice that."""
    forward_per_position: int
    """Of the output head."""
    backward_per_position: int

    def forward(self, work: Work) -> Tensor:
        """Flops of a forward pass without its output head."""
        return work.n_tokens * self.forward_per_token + work.n_pairs * self.forward_per_pair

    def backward(self, work: Work) -> Tensor:
        """Flops of the backward pass through it."""
        return work.n_tokens * self.backward_per_token + work.n_pairs * 2 * self.forward_per_pair


def costs_of(model: PreTrainedModel) -> Costs | None:
    """What the model costs with the adapter that is on now.

    None for a mixture of experts, of whose weights a token meets only some.
    """
    config = text_config(model)
    if optional_setting(config, "num_experts_per_tok"):
        return None
    adapter = active_adapter(lora_layers(model))
    matrices = [p for name, p in _matrices(model) if "lora_" not in name or f".{adapter}." in name]
    n_weights = sum(p.numel() for p in matrices)
    n_trained = sum(p.numel() for p in matrices if p.requires_grad)
    head = model.get_output_embeddings().weight
    n_heads: int = config.num_attention_heads
    return Costs(
        forward_per_token=2 * n_weights,
        backward_per_token=2 * (n_weights + n_trained),
        forward_per_pair=4 * head_dim(model) * n_heads // n_kv_heads(model),
        forward_per_position=2 * head.numel(),
        backward_per_position=2 * head.numel() * (2 if head.requires_grad else 1),
    )


def learner_work(death: Int[Tensor, "batch layer kv_head seq"], n_layers: int, n_kv_heads: int) -> Work:
    """Of one forward under a death table, in which padding is dead at birth.

    Args:
        death: of every layer and KV head, or one for all of either; no query after a row's last token counts.
    """
    column = torch.arange(death.shape[-1], device=death.device)
    layers = death.unbind(dim=1)  # the table may be large: what is computed of it is held for one layer
    is_token = torch.stack([(layer > column).any(dim=1) for layer in layers]).any(dim=0)
    end = torch.where(is_token, column + 1, 0).amax(dim=1)
    n_pairs = torch.zeros((), dtype=torch.long, device=death.device)
    for layer in layers:
        n_pairs += torch.minimum(layer, end[:, None, None]).sub_(column).clamp_(min=0).sum()
    shared_by = (n_layers // death.shape[1]) * (n_kv_heads // death.shape[2])
    return Work(is_token.sum(), n_pairs * shared_by)


def sampler_work(rollout: Rollout, group_size: int) -> tuple[Work, int]:
    """Of the sampling of a rollout, each prompt being read once for its group; and the logits' positions.

    A response of n tokens takes n − 1 steps behind its prompt: the last one is never read.
    """
    n_layers, n_kv_heads = rollout.death.shape[1:3]
    is_step = rollout.is_action & predicts(rollout.is_action)
    steps = is_step.sum()
    prompt_lens = (rollout.is_token & ~rollout.is_action)[::group_size].sum(dim=1)
    n_pairs = (prompt_lens * (prompt_lens + 1) // 2).sum() * n_layers * n_kv_heads
    for layer in range(n_layers):
        n_pairs = n_pairs + live_keys(rollout, layer).masked_fill(~is_step[:, None], 0).sum()
    return Work(prompt_lens.sum() + steps, n_pairs), len(prompt_lens) + int(steps)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of products below the output head; a table that tokens are looked up in is none."""
    head = model.get_output_embeddings().weight
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter is not head and id(parameter) not in tables:
            yield name, parameter
