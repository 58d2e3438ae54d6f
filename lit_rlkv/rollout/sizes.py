"""What sampling holds in memory, by formula: the cache, its records, and the largest tensors on the way."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import optional_setting, text_config

SAMPLING_COPIES = 4
"""Of the logits in float32 while a token is drawn: log-probs, noise, probabilities and their quotient."""
FLOAT32 = INT32 = 4
INT64 = 8


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder as its config has them.

    Where layers differ from each other, or keys from values (latent attention), bytes of the cache are an
    estimate.
    """

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_dim: int
    """Of one expert where there are several; four times `dim` where the config does not say."""
    vocab_size: int
    itemsize: int
    """Bytes of a number in the cache and in the layers."""


def shape_of(model: PreTrainedModel) -> ModelShape:
    """What the model computes in now: under autocast that is another precision than its weights'."""
    config = text_config(model)
    device, dtype = model.device.type, model.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    n_heads = int(config.num_attention_heads)
    mlp_dim = optional_setting(config, "intermediate_size")
    return ModelShape(
        n_layers=int(config.num_hidden_layers),
        dim=int(config.hidden_size),
        n_heads=n_heads,
        n_kv_heads=int(optional_setting(config, "num_key_value_heads") or n_heads),
        head_dim=int(optional_setting(config, "head_dim") or config.hidden_size // n_heads),
        mlp_dim=mlp_dim if isinstance(mlp_dim, int) else 4 * int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        itemsize=dtype.itemsize,
    )


def has_equal_layers(model: PreTrainedModel) -> bool:
    """Whether the shape is sure to be that of every layer's keys: each has a projection to just these."""
    shape = shape_of(model)
    widths = [
        int(module.out_features)
        for name, module in model.named_modules()
        if name.removesuffix(".base_layer").endswith("k_proj") and isinstance(module, nn.Linear)
    ]
    return widths == [shape.n_kv_heads * shape.head_dim] * shape.n_layers


def kv_bytes(
    *, n_layers: int, n_rows: int, n_kv_heads: int, n_slots: int, head_dim: int, itemsize: int
) -> int:
    """Of the keys and values in all slots of a cache."""
    return 2 * n_layers * n_rows * n_kv_heads * n_slots * head_dim * itemsize


def layer_bytes(n_tokens: int, *, dim: int, mlp_dim: int, itemsize: int) -> int:
    """Of what one layer holds of its tokens when its MLP is computed: 4·mlp + 2·dim numbers of each."""
    return n_tokens * (4 * mlp_dim + 2 * dim) * itemsize


def rows_under_way(n_prompts: int, n_samples: int, max_rows: int | None) -> int:
    """Rows of the cache for so many samples of each prompt; those of one prompt start together."""
    n_rows = n_prompts * n_samples
    return n_rows if max_rows is None else min(n_rows, max_rows // n_samples * n_samples)


@dataclass(frozen=True)
class SamplingSizes:
    """What `generate` holds, beside the model."""

    model: ModelShape
    cache: CacheSpec
    n_prompts: int
    n_prompt_columns: int
    """Tokens of the longest prompt."""
    n_samples: int
    max_rows: int | None
    max_new_tokens: int

    @property
    def n_responses(self) -> int:
        return self.n_prompts * self.n_samples

    @property
    def n_rows(self) -> int:
        return rows_under_way(self.n_prompts, self.n_samples, self.max_rows)

    @property
    def n_columns(self) -> int:
        return self.n_prompt_columns + self.max_new_tokens

    @property
    def n_slots(self) -> int:
        return self.cache.n_slots(self.n_columns)

    @property
    def kv_bytes(self) -> int:
        shape = self.model
        return kv_bytes(
            n_layers=shape.n_layers,
            n_rows=self.n_rows,
            n_kv_heads=shape.n_kv_heads,
            n_slots=self.n_slots,
            head_dim=shape.head_dim,
            itemsize=shape.itemsize,
        )

    @property
    def slot_record_bytes(self) -> int:
        """The column of each slot's key."""
        return INT64 * self.model.n_layers * self.n_rows * self.model.n_kv_heads * self.n_slots

    @property
    def n_death_rows(self) -> int:
        """The table of the rows under way, and the copies of those that have ended: in the end, of all."""
        return self.n_rows + self.n_responses

    @property
    def death_bytes(self) -> int:
        return INT32 * self.model.n_layers * self.n_death_rows * self.model.n_kv_heads * self.n_columns

    @property
    def step_bytes(self) -> int:
        """The logits of a decode step, and what drawing tokens makes of them."""
        return self.n_rows * self.model.vocab_size * (self.model.itemsize + SAMPLING_COPIES * FLOAT32)

    @property
    def n_prefilled(self) -> int:
        """Prompts that are read at a time."""
        return self.n_rows // self.n_samples

    @property
    def prefill_logits_bytes(self) -> int:
        """Those of each prompt once, which its samples then have in common, as in a decode step."""
        return self.n_prefilled * self.model.vocab_size * self.model.itemsize + self.step_bytes

    @property
    def prefill_bytes(self) -> int:
        """All prompts on their way through one layer."""
        shape = self.model
        return layer_bytes(
            self.n_prefilled * self.n_prompt_columns,
            dim=shape.dim,
            mlp_dim=shape.mlp_dim,
            itemsize=shape.itemsize,
        )

    @property
    def allocated_bytes(self) -> int:
        """What the first prefill allocates for the whole of sampling, whatever the prompts turn out to be."""
        table = self.death_bytes * self.n_rows // self.n_death_rows
        return self.kv_bytes + self.slot_record_bytes + table
