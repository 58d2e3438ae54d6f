"""What a run asks of the machine, checked before torch is imported: an accelerator, and a model of the hub."""

import ctypes
import os
import sys
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from lit_rlkv.config.errors import require
from lit_rlkv.config.schema import Config
from lit_rlkv.config.targets import is_local

HUB = "https://huggingface.co"
PATIENCE_S = 5.0
"""Longest wait for an answer of the hub, name lookup included."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
DRIVERS = ("libcuda.so.1", "libamdhip64.so")
NO_DEVICES = ("", "-1")


def check_machine(cfg: Config) -> None:
    """Check that there is the accelerator of a config, and its model if that is a name on the hub.

    Raises:
        ConfigError: there is none, or the model can neither be downloaded nor is in the cache.
    """
    accelerator = cfg.fabric.accelerator
    require(
        accelerator not in ("gpu", "cuda") or may_have_gpu(),
        f"fabric.accelerator={accelerator} needs a GPU, and this machine shows none; use fabric.accelerator=cpu "
        "or auto",
    )
    path = cfg.model.path
    if path is not None and not is_local(path):
        check_hub_model(path)


def may_have_gpu() -> bool:
    """False if there is certainly no GPU for torch: no driver, or no visible device."""
    if sys.platform != "linux":
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in NO_DEVICES:
        return False
    return any(_is_library(driver) for driver in DRIVERS) or Path("/dev/kfd").exists()


def _is_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def check_hub_model(name: str) -> None:
    """Check that a model of the hub can be loaded, and have it loaded from the cache if the hub is away.

    transformers asks the hub again and again for a minute before it looks into the cache.

    Raises:
        ConfigError: the hub does not answer, and the model is not in the cache.
    """
    is_offline = any(os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE") for key in OFFLINE)
    if not is_offline and answers(f"{os.environ.get('HF_ENDPOINT', HUB)}/{name}/resolve/main/config.json"):
        return
    reason = f"{OFFLINE[0]} is set" if is_offline else "the hub cannot be reached"
    require(
        is_cached(name),
        f"model.path={name} is neither a folder nor in the cache of downloaded models, and {reason}; give a "
        f"local folder, or download it where there is a network: hf download {name}",
    )
    os.environ[OFFLINE[0]] = "1"  # read when huggingface_hub is imported


def answers(url: str, patience_s: float = PATIENCE_S) -> bool:
    """True if a server answers at all, be it with an error, which the hub's own client explains better."""
    is_answered = False

    def ask() -> None:
        nonlocal is_answered
        try:
            with urlopen(Request(url, method="HEAD"), timeout=patience_s):
                is_answered = True
        except HTTPError:
            is_answered = True
        except (OSError, ValueError):
            pass

    # Name lookup has no time-out of its own, so the wait is bounded from outside.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience_s)
    return is_answered


def is_cached(name: str) -> bool:
    """True if the cache of the hub has a snapshot of a model."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = Path(os.environ.get("HF_HOME", home), "hub")
    cache = Path(os.environ.get("HF_HUB_CACHE", hub)).expanduser()
    return any(cache.joinpath(f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))
