"""Balance of keys: int4 divides each channel of a layer's keys by it, and multiplies the queries."""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.models.backbone import dense_states, optional_setting, text_config

N_TOKENS = 256
MOST_DOUBLINGS = 8
"""A channel is divided or multiplied by at most 2 to this power."""


@torch.no_grad()
def key_balance(model: PreTrainedModel) -> tuple[Float[Tensor, "kv_head dim"], ...]:
    """Return, for each layer with attention, the power of two nearest to √(rms key / rms query) by channel.

    An error of a key's channel counts in the logits by the queries there. Divided and multiplied so, keys and
    queries are equally large in each channel, and none sets the scale of others that count more, as
    SmoothQuant (arXiv:2211.10438) has it for activations and weights. Powers of two round nothing. They are
    measured on a forward of `N_TOKENS` random tokens, the same ones always, and so depend on no prompt.
    """
    found: dict[int, Tensor] = {}

    def look(inputs: AttentionInputs) -> None:
        assert inputs.query is not None
        key, n_heads = inputs.key.double(), inputs.key.shape[1]
        query = inputs.query.double().square().mean((0, 2)).view(n_heads, -1, key.shape[-1]).mean(1)
        ratio = key.square().mean((0, 2)) / query
        doublings = (ratio.log2() / 4).nan_to_num(0.0).round().clamp(-MOST_DOUBLINGS, MOST_DOUBLINGS)
        found[inputs.layer] = doublings.exp2().to(inputs.key.dtype)  # exact in 16 bits, too

    config = text_config(model)
    n_tokens = min(N_TOKENS, optional_setting(config, "max_position_embeddings") or N_TOKENS)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(config.vocab_size, (1, n_tokens), generator=generator).to(model.device)
    with use_kernels("reference"):
        dense_states(model, input_ids, probe=look)
    return tuple(found[layer] for layer in sorted(found))
