"""Error of vectors that moved since their codes were recorded, as of a reference or after updates."""

import torch

from lit_rlkv.kernels.quantization import quantize, quantized, record_of

STEPS = (0.0, 0.25, 0.5, 1.0)
"""Standard deviation of a number's move, in steps of its vector; e4m3 has the step of numbers near 1 here."""
N_VECTORS, DIM = 4000, 64
E4M3_STEP = 2.0**-3


def measure(dtype: str, steps: float) -> dict[str, float]:
    """Return the root mean square error of Gaussian vectors, rounded by themselves and by the record."""
    generator = torch.Generator().manual_seed(0)
    vectors, moves = (torch.randn(N_VECTORS, DIM, generator=generator) for _ in range(2))
    codes, scales = quantize(vectors, dtype)
    step = E4M3_STEP if dtype == "fp8" else scales[..., :1].float()
    moved = vectors + steps * step * moves
    by_record = quantized(moved, dtype, record_of(codes, scales, dtype))
    errors = {"by_itself": quantized(moved, dtype), "by_record": by_record}
    return {name: ((found - moved) / step).square().mean().sqrt().item() for name, found in errors.items()}
