"""Check the machine before torch is imported: is there the accelerator, the model and the data of a run?"""

import ctypes
import os
import re
import sys
from functools import cache
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from lit_rlkv.config.errors import require
from lit_rlkv.config.schema import Config
from lit_rlkv.config.targets import is_local

HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0
"""Longest wait for an answer of the hub, name lookup included."""
PROXIES = ("ALL_PROXY", "all_proxy")
"""Proxies that the hub's client uses and urllib does not know."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
LOADERS = ("lit_rlkv.tasks.load_problems", "lit_rlkv.tasks.load_preferences")
OWNER_AND_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
FILES = (".json", ".jsonl", ".parquet")
DRIVERS = ("libcuda.so.1", "libamdhip64.so")
NO_DEVICES = ("", "-1")


def check_machine(cfg: Config) -> None:
    """Check that there is the accelerator of a config, and its model and data if they are names on the hub.

    Raises:
        ConfigError: there is none, or model or data can neither be downloaded nor are in the cache.
    """
    accelerator = cfg.fabric.accelerator
    require(
        accelerator not in ("gpu", "cuda") or may_have_gpu(),
        f"fabric.accelerator={accelerator} needs a GPU, and this machine shows none; use "
        "fabric.accelerator=cpu or auto",
    )
    is_offline = any(os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE") for key in OFFLINE)
    for name, kind in names_on_hub(cfg).items():
        check_hub(name, kind, is_offline=is_offline)


def names_on_hub(cfg: Config) -> dict[str, str]:
    """Return the model and the dataset of a config that are names on the hub, each with its kind."""
    names = {}
    if cfg.model.path is not None and not is_local(cfg.model.path):
        names[cfg.model.path] = "model"
    dataset = str(cfg.task.get("dataset") or "")
    is_name = OWNER_AND_NAME.fullmatch(dataset) is not None and not is_local(dataset)
    if cfg.task.get("_target_") in LOADERS and is_name and Path(dataset).suffix.lower() not in FILES:
        names[dataset] = "dataset"
    return names


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


def check_hub(name: str, kind: str, *, is_offline: bool) -> None:
    """Check that a model or dataset of the hub can be loaded; from the cache if the hub does not answer.

    The clients of the hub would ask again and again for a minute before they look into the cache.

    Raises:
        ConfigError: the hub does not answer, and the cache does not have it.
    """
    if not is_offline and answers(os.environ.get("HF_ENDPOINT", HUB)):
        return
    key, option = ("model.path", "") if kind == "model" else ("task.dataset", " --repo-type dataset")
    reason = f"{OFFLINE[0]} is set" if is_offline else "the hub cannot be reached"
    require(
        is_cached(name, kind),
        f"{key}={name} is neither a local folder nor in the cache of the hub, and {reason}; give a local "
        f"folder, or download it where there is a network: hf download {name}{option}",
    )
    os.environ[OFFLINE[0]] = "1"  # read when huggingface_hub is imported


@cache
def answers(url: str, timeout_s: float = HUB_TIMEOUT_S) -> bool:
    """False if a server certainly cannot be reached; the hub's own client judges all other cases better."""
    if any(os.environ.get(key) for key in PROXIES):
        return True
    is_away = False

    def ask() -> None:
        nonlocal is_away
        try:
            with urlopen(Request(url, method="HEAD"), timeout=timeout_s):
                pass
        except HTTPError:
            pass  # an answer, too
        except URLError as error:
            is_away = not isinstance(error.reason, SSLError | TimeoutError)  # it may have other certificates
        except (TimeoutError, ValueError, HTTPException):
            pass
        except OSError:
            is_away = True

    # Name lookup has no time-out of its own, so the wait is bounded from outside.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return not is_away


def is_cached(name: str, kind: str) -> bool:
    """True if a cache of the hub has a snapshot of a model or dataset."""
    home = _folder("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    hub = _folder("HF_HUB_CACHE", _folder("HUGGINGFACE_HUB_CACHE", home / "hub"))
    is_downloaded = any(hub.glob(f"{kind}s--{name.replace('/', '--')}/snapshots/*/*"))
    prepared = _folder("HF_DATASETS_CACHE", home / "datasets")
    # datasets writes parts of the name in snake case
    names = {folder.name.replace("_", "").lower() for folder in prepared.glob("*/")}
    return is_downloaded or (kind == "dataset" and name.replace("/", "").replace("_", "").lower() in names)


def _folder(variable: str, default: Path) -> Path:
    return Path(os.path.expandvars(os.environ.get(variable, default))).expanduser()
