"""KVScorer: the trained part of the policy `learned`, which scores keys layer by layer and head by head."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class KVShape(NamedTuple):
    """Sizes of the keys and values of a layer."""

    n_kv_heads: int
    key_dim: int
    value_dim: int


class KVScorer(nn.Module):
    """A `LayerScorer` for each layer with attention; at the start all scores are 0."""

    def __init__(self, shapes: Sequence[KVShape], hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LayerScorer(shape, hidden) for shape in shapes)

    def layer(self, number: int) -> "LayerScorer":
        """Return the scorer of a layer, by its place among the layers with attention."""
        return cast(LayerScorer, self.layers[number])


class LayerScorer(nn.Module):
    """Scores s = u·silu(W·x + b) + a·log(1 + age) with weights of each KV head, in float32 or higher.

    x is key and value, each divided by its root mean square, and the logarithms of both. u and a start at 0.
    The score of a key changes with its age by one term, so that a learner computes the rest once for all
    compactions.
    """

    def __init__(self, shape: KVShape, hidden: int) -> None:
        super().__init__()
        n_heads, n_features = shape.n_kv_heads, shape.key_dim + shape.value_dim + 2
        self.n_kv_heads = n_heads
        self.weight = nn.Parameter(torch.randn(n_heads, hidden, n_features) * n_features**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_heads, hidden))
        self.out = nn.Parameter(torch.zeros(n_heads, hidden))
        self.age = nn.Parameter(torch.zeros(n_heads))

    def forward(
        self,
        keys: Float[Tensor, "batch kv_head slot dim"],
        values: Float[Tensor, "batch kv_head slot dim_v"],
        log_age: Float[Tensor, "batch #kv_head compaction slot"],  # noqa: F821 (ruff reads the shape as code)
    ) -> Float[Tensor, "batch kv_head compaction slot"]:
        """Return the scores of the keys at each compaction.

        Args:
            log_age: log(1 + n), for a key that n queries have seen.
        """
        with torch.autocast(keys.device.type, enabled=False):
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            # Products are divided, and not keys and values, which would be copied.
            sizes = [keys.shape[-1], values.shape[-1], 2]
            of_keys, of_values, of_logs = torch.split(self.weight.to(dtype).mT[None], sizes, dim=-2)
            keys, values = keys.to(dtype), values.to(dtype)
            key_rms, value_rms = _rms(keys), _rms(values)
            hidden = keys @ of_keys / key_rms + values @ of_values / value_rms
            hidden = hidden + torch.cat([key_rms, value_rms], dim=-1).log() @ of_logs
            hidden = F.silu(hidden + self.bias.to(dtype)[None, :, None])
            content = (hidden @ self.out.to(dtype)[None, :, :, None]).squeeze(-1)
            return content[:, :, None] + self.age.to(dtype)[None, :, None, None] * log_age.to(dtype)


def _rms(
    vectors: Float[Tensor, "batch kv_head slot dim"],
) -> Float[Tensor, "batch kv_head slot 1"]:
    """Return the root mean square of vectors, above 0."""
    return vectors.square().mean(-1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny).sqrt()
