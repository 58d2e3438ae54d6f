"""Quantize keys and values as the rollout's cache did."""

from torch import Tensor

from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.kernels.quantization import quantized, record_bytes
from lit_rlkv.types import Codes


def quantized_as(codes: Codes, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quantized keys and values [row, kv_head, column, dim] of a layer."""
    key, value = to_autocast_dtype(key, value)
    record = codes.record[:, layer, :: codes.record.shape[2] // key.shape[1]].movedim(2, 3)
    balance = codes.balance[layer][:, None].to(key) if codes.balance else key.new_ones(())
    parts: tuple[Tensor | None, Tensor | None] = None, None
    if record.shape[-1] > 0:
        n_key, n_value = (record_bytes(each.shape[-1], codes.dtype, codes.group) for each in (key, value))
        parts = record[..., :n_key], record[..., n_key : n_key + n_value]
    key = quantized(key / balance, codes.dtype, parts[0], codes.group) * balance
    return key, quantized(value, codes.dtype, parts[1], codes.group)
