"""The most flops per second that a device makes of dense products, to measure utilisation by."""

import torch
from lightning.fabric.utilities.throughput import get_available_flops

H200 = {torch.float32: 66.9e12, "tf32": 494.7e12, torch.bfloat16: 989.4e12, torch.float16: 989.4e12}
NVL = {torch.float32: 60e12, "tf32": 417.5e12, torch.bfloat16: 835.5e12, torch.float16: 835.5e12}
HOPPER = {"H200 NVL": NVL, "H100 NVL": NVL, "H200": H200}
"""NVIDIA's data sheets, one card, without sparsity, by what a name contains; the first that fits.

Lightning has these with sparsity or of two cards, twice as much, and misses "NVIDIA H200" as drivers call it.
"""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Flops per second at a precision of products; None where the device is not known.

    float32 is that of the tensor cores (TF32) where torch may use them for it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peaks in HOPPER.items():
            if known in name:
                is_tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
                return peaks.get("tf32" if is_tf32 else dtype)
    found = get_available_flops(device, dtype)
    return None if found is None else float(found)
