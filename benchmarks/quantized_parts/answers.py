"""Cells of the pretrained benchmark under rounded caches, at budgets of equal bytes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from pretrained_parts.setting import DENSE, Cell, Sizes

from lit_rlkv.kernels.quantization import KV_DTYPES, quantized_bytes
from lit_rlkv.kvcache import CacheSpec

DTYPES = (None, *KV_DTYPES)
HEAD_DIM = 64
"""Dimensions of a head of SmolLM2."""
KINDS = ("recall", "few_shot")
POLICY = {"recall": "snapkv", "few_shot": "knorm"}
"""The best policy of each kind in docs/results/pretrained.md."""
BUDGETS = (16, 32, 64, 128)
"""Keys in 16 bit whose bytes all dtypes get."""
PROMPTS = 8
SIZES = Sizes()


@dataclass(frozen=True)
class QuantizedCell(Cell):
    """A cell whose cache rounds; its budget is what fits in the bytes of `keys_16bit` keys."""

    dtype: str | None = None
    keys_16bit: int | None = None

    @property
    def cache(self) -> CacheSpec:
        return replace(super().cache, dtype=self.dtype)

    def described(self, model: str) -> dict:
        return super().described(model) | asdict(self)


def equal_budget(keys_16bit: int, dtype: str | None) -> int:
    """Return the keys whose codes and scales take the bytes of so many keys in 16 bit."""
    sixteen = quantized_bytes(HEAD_DIM, None, torch.bfloat16)
    return keys_16bit * sixteen // quantized_bytes(HEAD_DIM, dtype, torch.bfloat16)


def cells(kinds: tuple[str, ...] = KINDS, budgets: tuple[int, ...] = BUDGETS) -> Iterator[QuantizedCell]:
    """Yield all cells; those of a kind and dtype follow each other, because they share a prefill."""
    for kind in kinds:
        for dtype in DTYPES:
            size = {"chunk": 0, "rows": PROMPTS, "tokens": SIZES.answer_tokens, "dtype": dtype}
            yield QuantizedCell(kind, DENSE, None, **size)
            for keys in budgets:
                yield QuantizedCell(kind, POLICY[kind], equal_budget(keys, dtype), keys_16bit=keys, **size)
