"""RL post-training of language models under a KV cache of fixed size, which the learner replays exactly.

    from lit_rlkv import CacheSpec, Rollout, generate, prepare_backbone, replay_logps

The names are loaded at first use, so that `import lit_rlkv` imports neither torch nor transformers.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlkv.kvcache import CacheSpec
    from lit_rlkv.log_row import LogRow
    from lit_rlkv.models import eviction_delays, prepare_backbone, replay_logps
    from lit_rlkv.rollout import Rollout, generate, score_tokens
    from lit_rlkv.types import NEVER

try:
    __version__ = version("lit_rlkv")
except PackageNotFoundError:  # a clone that is imported without being installed
    __version__ = "unknown"
_HOMES = {
    "CacheSpec": "lit_rlkv.kvcache",
    "LogRow": "lit_rlkv.log_row",
    "NEVER": "lit_rlkv.types",
    "Rollout": "lit_rlkv.rollout",
    "eviction_delays": "lit_rlkv.models",
    "generate": "lit_rlkv.rollout",
    "prepare_backbone": "lit_rlkv.models",
    "replay_logps": "lit_rlkv.models",
    "score_tokens": "lit_rlkv.rollout",
}
__all__ = [
    "NEVER",
    "CacheSpec",
    "LogRow",
    "Rollout",
    "__version__",
    "eviction_delays",
    "generate",
    "prepare_backbone",
    "replay_logps",
    "score_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_rlkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
