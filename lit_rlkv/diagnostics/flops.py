"""Floating point operations of a model by formula, as model flops utilization counts them (arXiv:2204.02311).

The product of a weight matrix and the state of one token takes 2 flops per weight. Its backward pass takes 2
for the gradient of the state and 2 for the gradient of the weight, unless it is frozen: full training takes
2 + 4 flops per weight and token, LoRA 2 + 2 per frozen weight and 2 + 4 per adapter weight. Attention is two
products, 4·head_dim flops for each query head, query and key that it sees; its backward pass takes twice as
much.

A prompt counts once for each of its responses, although the learner may compute it once for all of them.
Padding, masked pairs and recomputed layers (checkpointing) do not count, nor do norms, activations and
rotations, which are small. Under LoRA the gradient of the first layer's input is not needed, but counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.evictions import cached_keys, response_queries
from lit_rlkv.models.adapters import active_adapter, lora_layers
from lit_rlkv.models.backbone import head_dims, n_kv_heads, text_config
from lit_rlkv.models.lm_head import model_body
from lit_rlkv.models.replay import prompt_columns
from lit_rlkv.types import Rollout


@dataclass(frozen=True)
class ForwardWork:
    """Amount of work in one forward."""

    n_tokens: Int[Tensor, ""]
    """Tokens without padding."""
    n_pairs: Int[Tensor, ""]
    """Keys that a query sees, over all its queries, layers and KV heads."""


@dataclass(frozen=True)
class FlopCosts:
    """Flops of a backbone in its active role: of the body, and of the output head."""

    forward_per_token: int
    backward_per_token: int
    forward_per_pair: int
    """For each KV head, query and key that it sees; the backward pass takes twice that."""
    forward_per_position: int
    """Flops of the output head per position."""
    backward_per_position: int

    def forward(self, work: ForwardWork) -> Tensor:
        """Return the flops of a forward pass without the output head."""
        return work.n_tokens * self.forward_per_token + work.n_pairs * self.forward_per_pair

    def backward(self, work: ForwardWork) -> Tensor:
        """Return the flops of the backward pass without the output head."""
        return work.n_tokens * self.backward_per_token + work.n_pairs * 2 * self.forward_per_pair


def flop_costs(model: PreTrainedModel) -> FlopCosts | None:
    """Return the flop costs of a model with its active adapter.

    None if some weight is not used exactly once per token, as in a mixture of experts, or if layers differ in
    head width.
    """
    body = _language_model(model)
    adapter = active_adapter(lora_layers(model))
    matrices = [p for name, p in _matrices(body) if "lora_" not in name or f".{adapter}." in name]
    # Families name the setting differently, but the modules alike; most hold all experts in one tensor.
    has_experts = any(name.endswith("experts") for name, _ in body.named_modules())
    dims = head_dims(model)
    if has_experts or any(p.ndim > 2 for p in matrices) or len(dims) > 1:
        return None
    n_weights = sum(map(_n_weights, matrices))
    n_trained = sum(_n_weights(p) for p in matrices if p.requires_grad)
    head = model.get_output_embeddings().weight
    n_heads: int = text_config(model).num_attention_heads
    return FlopCosts(
        forward_per_token=2 * n_weights,
        backward_per_token=2 * (n_weights + n_trained),
        forward_per_pair=4 * dims.pop() * n_heads // n_kv_heads(model),
        forward_per_position=2 * _n_weights(head),
        backward_per_position=2 * _n_weights(head) * (2 if head.requires_grad else 1),
    )


def learner_work(
    evicted_at: Int[Tensor, "batch layer kv_head seq"], n_layers: int, n_kv_heads: int
) -> ForwardWork:
    """Return the work of one forward under an eviction table; padding has lifetime 0 in it.

    Args:
        evicted_at: table of every layer and KV head, or one for all of them.
    """
    column = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    layers = evicted_at.unbind(dim=1)  # the table may be large, so intermediate results are of one layer
    attention_mask = torch.stack([(layer > column).any(dim=1) for layer in layers]).any(dim=0)
    end = torch.where(attention_mask, column + 1, 0).amax(dim=1)
    n_pairs = torch.zeros((), dtype=torch.long, device=evicted_at.device)
    for layer in layers:
        n_pairs += torch.minimum(layer, end[:, None, None]).sub_(column).clamp_(min=0).sum()
    shared_by = (n_layers // evicted_at.shape[1]) * (n_kv_heads // evicted_at.shape[2])
    return ForwardWork(attention_mask.sum(), n_pairs * shared_by)


def rollout_work(rollout: Rollout, group_size: int) -> tuple[ForwardWork, int]:
    """Return the work of sampling a rollout, and its number of logit positions.

    Each prompt is read once for its group. The tokens after it are read once for each response, but for its
    last one, which is never read. Logits are computed where a token is sampled after them.
    """
    n_layers, n_kv_heads = rollout.record.evicted_at.shape[1:3]
    column = torch.arange(rollout.input_ids.shape[1], device=rollout.input_ids.device)
    is_prompt = rollout.attention_mask & (column < prompt_columns(rollout)[:, None])
    is_read = rollout.attention_mask & response_queries(rollout.attention_mask) & ~is_prompt
    prompt_lens = is_prompt[::group_size].sum(dim=1)
    n_pairs = (prompt_lens * (prompt_lens + 1) // 2).sum() * n_layers * n_kv_heads
    for layer in range(n_layers):
        n_pairs = n_pairs + cached_keys(rollout, layer).masked_fill(~is_read[:, None], 0).sum()
    n_positions = len(prompt_lens) + int(rollout.response_mask.sum()) - len(rollout.input_ids)
    return ForwardWork(prompt_lens.sum() + is_read.sum(), n_pairs), n_positions


def _language_model(model: PreTrainedModel) -> nn.Module:
    """Return the language model below the output head, without vision towers."""
    kind = type(text_config(model))
    parts = (part for part in model_body(model).modules() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if isinstance(part.config, kind)), model_body(model))


def _matrices(body: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights of matrix products; embedding tables are not among them."""
    tables = {id(module.weight) for module in body.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in body.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in tables:
            yield name, parameter


def _n_weights(parameter: Tensor) -> int:
    """Return the number of weights; bitsandbytes packs two 4-bit weights into one element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


H200 = {torch.float32: 66.9e12, "tf32": 494.7e12, torch.bfloat16: 989.4e12, torch.float16: 989.4e12}
NVL = {torch.float32: 60e12, "tf32": 417.5e12, torch.bfloat16: 835.5e12, torch.float16: 835.5e12}
HOPPER = {"H200 NVL": NVL, "H100 NVL": NVL, "H200": H200}
"""NVIDIA's data sheets, one card, without sparsity, by part of the device name; the first match counts.

Lightning's values are with sparsity or for two cards, and it does not know the driver's name "NVIDIA H200".
"""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak flops per second of a device for dense products; None if it is unknown.

    float32 means TF32 on tensor cores if torch may use it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peaks in HOPPER.items():
            if known in name:
                is_tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
                return peaks.get("tf32" if is_tf32 else dtype)
    found = get_available_flops(device, dtype)
    return None if found is None else float(found)
