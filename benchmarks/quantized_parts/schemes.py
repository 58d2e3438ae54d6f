"""KL of the model with rounded keys and values, with a zero point and without."""

from collections.abc import Callable

import torch
from quantized_parts.replay import in_place_of
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kernels.token_logps.reference import kl_of_logits
from lit_rlkv.models import quantized_view
from lit_rlkv.models.backbone import head_logits, hidden_states
from lit_rlkv.types import NEVER, Codes, Record

BITS = (8, 4)
N_SKIPPED = 16
"""First tokens of a text, which have little to look back at."""


def symmetric(bits: int) -> Callable[..., Tensor]:
    """Return the rounding to multiples of max |x| / (2^(bits-1) - 1)."""
    most = 2 ** (bits - 1) - 1

    def rounds(x: Tensor, *_: object) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / most).bfloat16().float()
        return (x / scale).round().clamp(-most, most) * scale

    return rounds


def with_zero_point(bits: int) -> Callable[..., Tensor]:
    """Return the rounding to 2^bits numbers from the smallest of a vector to its largest."""
    most = 2**bits - 1

    def rounds(x: Tensor, *_: object) -> Tensor:
        zero = x.amin(-1, keepdim=True).bfloat16().float()
        scale = ((x - zero).amax(-1, keepdim=True) / most).bfloat16().float()
        return ((x - zero) / scale).round().clamp(0, most) * scale + zero

    return rounds


SCHEMES = {"symmetric": symmetric, "with a zero point": with_zero_point}


@torch.no_grad()
def measure(model: PreTrainedModel, text: Tensor, scheme: str, bits: int) -> dict[str, float]:
    """Return the KL from the exact model to the rounded one in nats, mean over tokens with all keys."""
    evicted_at = torch.full((len(text), 1, 1, text.shape[1]), NEVER, dtype=torch.int32)
    unread = torch.zeros((), dtype=torch.uint8).expand(
        len(text), model.config.num_hidden_layers, model.config.num_key_value_heads, 1, text.shape[1]
    )
    positions = torch.arange(text.shape[1]).expand_as(text)

    def logits(codes: Codes | None) -> Tensor:
        hidden = hidden_states(model, text, positions, record=Record(evicted_at, codes=codes))
        return head_logits(model, hidden[:, N_SKIPPED:])

    exact = logits(None)
    with in_place_of(quantized_view, "quantized", SCHEMES[scheme](bits)):
        rounded = logits(Codes("int8", unread))
    return {"kl": kl_of_logits(exact, rounded, 1.0).double().mean().item()}
