"""Named random streams, derived from the seed and the purpose of a draw."""

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on all names, equal on every machine and Python version."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for one purpose, such as `stream(seed, "sample", step, rank)`."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))
