"""From the command line to a checked `Config` and to objects; without torch or transformers."""

from lit_rlkv.config.composing import CONF_DIR, SWEEPS_DIR, composed, quoted
from lit_rlkv.config.errors import ConfigError, as_config_errors, require
from lit_rlkv.config.keys import PRESETS, check_keys
from lit_rlkv.config.model_path import check_source, expanded, find_gguf, is_local
from lit_rlkv.config.parsing import AUTO, check_folders, parse, parse_config
from lit_rlkv.config.run_labels import label_logger
from lit_rlkv.config.schema import Config
from lit_rlkv.config.targets import build, check_saved_code, check_targets, grant_trust

__all__ = [
    "AUTO",
    "CONF_DIR",
    "PRESETS",
    "SWEEPS_DIR",
    "Config",
    "ConfigError",
    "as_config_errors",
    "build",
    "check_folders",
    "check_keys",
    "check_saved_code",
    "check_source",
    "check_targets",
    "composed",
    "expanded",
    "find_gguf",
    "grant_trust",
    "is_local",
    "label_logger",
    "parse",
    "parse_config",
    "quoted",
    "require",
]
