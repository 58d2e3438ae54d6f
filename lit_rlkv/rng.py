"""Named streams of randomness: every draw is a function of the seed and of what it is for."""

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on every name given, the same on every machine and Python."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose: `stream(seed, "sample", step, rank)`."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))
