"""The devices that a plan is for: their memory, its bandwidth, and matrix products."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from lit_rlkv.config import ConfigError

GIB = 2**30
CONTEXT, FRAGMENTS = int(0.7 * GIB), 0.06
"""Bytes that driver and libraries take, on a CPU Python and torch, and share of the rest lost between
allocations: assumed."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SIZE = re.compile(r"(\d+(?:\.\d+)?)(?: ?Gi?B?)?", re.IGNORECASE)
SIZE_AFTER, MOST_GIB = re.compile(r"[ _-]+\d+ ?gi?b$", re.IGNORECASE), 512
SLOWER = {"pcie", "nvl"}
"""Words in the names of cards that are slower than the one of the same name in `CARDS`."""


@dataclass(frozen=True)
class Card:
    """A device."""

    name: str
    memory: int
    """Bytes in all."""
    bandwidth: float | None = None
    """Bytes a second of its memory; None: unknown, and no times are planned."""
    flops: float | None = None
    """Dense products a second in bfloat16."""
    is_gpu: bool = True

    @property
    def usable(self) -> int:
        """Bytes that a run can allocate."""
        return max(int((self.memory - CONTEXT) * (1 - FRAGMENTS)), 0)


def _gib(size: float) -> int:
    return int(size * GIB)


CARDS = {
    card.name: card
    for card in (
        Card("RTX3090", _gib(23.7), 0.936e12, 71e12),
        Card("RTX4090", _gib(23.6), 1.008e12, 165e12),
        Card("RTX5090", _gib(31.4), 1.792e12, 209e12),
        Card("L4", _gib(22.2), 0.300e12, 121e12),
        Card("A10G", _gib(22.2), 0.600e12, 70e12),
        Card("L40S", _gib(44.5), 0.864e12, 362e12),
        Card("A100-40GB", _gib(39.4), 1.555e12, 312e12),
        Card("A100", _gib(79.3), 2.039e12, 312e12),
        Card("H100", _gib(79.1), 3.35e12, 989e12),
        Card("H200", _gib(139.8), 4.8e12, 989e12),
        Card("B200", _gib(178.4), 8.0e12, 2250e12),
    )
}
"""By the makers' data sheets: A100 of 80 GB, H100 and H200 SXM; memory as the driver reports it, about."""


def find_card(name: str | None) -> Card:
    """Return a card by its name or by its gigabytes; None: the device of this machine.

    A card of so many gigabytes has the speed of the one in `CARDS` whose memory is nearest.

    Raises:
        ConfigError: there is none of this name.
    """
    if name is None:
        return own_card(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    known = {_plain(one): card for one, card in CARDS.items()}
    plain = _plain(name)
    found = known.get(plain) or known.get(f"rtx{plain}") or known.get(_plain(SIZE_AFTER.sub("", name)))
    if found is not None:
        return found
    size = SIZE.fullmatch(name.strip())
    if size is None or not 1 <= float(size[1]) <= MOST_GIB:
        raise ConfigError(
            f"gpu={name} is no card known here and no size up to {MOST_GIB} GB; give one of "
            f"{', '.join(CARDS)}, or its memory, such as gpu=24GB"
        )
    memory = int(0.985 * float(size[1]) * GIB)  # of which the driver keeps some
    like = min(CARDS.values(), key=lambda card: abs(card.memory - memory))
    return replace(like, name=f"{size[1]} GB (as fast as {like.name})", memory=memory)


def own_card(device: torch.device) -> Card:
    """Return a device of this machine."""
    if device.type != "cuda":
        return Card("this machine's CPU", machine_memory(), is_gpu=False)
    name = torch.cuda.get_device_name(device)
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    words = [_plain(word) for word in re.findall(r"\w+", name)]
    words += [first + second for first, second in pairwise(words)]  # RTX 4090
    alike = [card for card in CARDS.values() if _plain(SIZE_AFTER.sub("", card.name)) in words]
    if not alike or SLOWER & {*words}:
        return Card(name, memory)
    like = min(alike, key=lambda card: abs(card.memory - memory))
    return replace(like, name=name, memory=memory)


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container's limit."""
    limits = [Path(name).read_text().strip() for name in CGROUP_LIMITS if Path(name).is_file()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdecimal())])


def available_memory(n_processes: int = 1) -> int:
    """Return the bytes that one of so many processes may hope for, with swap, of what is left."""
    memory = psutil.virtual_memory()
    left = memory.available if psutil.LINUX else memory.total  # other systems compress, and add swap
    found = [(min(machine_memory(), left) + psutil.swap_memory().free) // n_processes]
    if psutil.LINUX:
        process = psutil.Process()
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        found += [] if limit == psutil.RLIM_INFINITY else [limit - process.memory_info().vms]
    return max(min(found), 0)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
