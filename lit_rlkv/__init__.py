"""RL post-training of language models under a KV cache of fixed size, which the learner replays exactly.

    from lit_rlkv import CacheSpec, Rollout, generate, prepare_backbone, replay_logps

The names are loaded at first use, so that `import lit_rlkv` imports neither torch nor transformers.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlkv.kvcache import CacheSpec
    from lit_rlkv.models import prepare_backbone, replay_logps
    from lit_rlkv.rollout import Rollout, generate

try:
    __version__ = version("lit_rlkv")
except PackageNotFoundError:  # a clone that is imported without being installed
    __version__ = "unknown"
__all__ = ["CacheSpec", "Rollout", "__version__", "generate", "prepare_backbone", "replay_logps"]

_HOMES = {
    "CacheSpec": "lit_rlkv.kvcache",
    "Rollout": "lit_rlkv.rollout",
    "generate": "lit_rlkv.rollout",
    "prepare_backbone": "lit_rlkv.models",
    "replay_logps": "lit_rlkv.models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_rlkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
