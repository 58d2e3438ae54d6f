"""From the command line to a checked `Config` and to objects; without torch or transformers."""

from lit_rlkv.config.arguments import check_command_line
from lit_rlkv.config.composing import CONF_DIR, PRESETS, SWEEPS_DIR, check_keys, composed, quoted
from lit_rlkv.config.errors import ConfigError, as_config_errors, require
from lit_rlkv.config.parsing import AUTO, check_folders, parse, parse_config
from lit_rlkv.config.run_labels import label_logger
from lit_rlkv.config.schema import Config
from lit_rlkv.config.targets import (
    build,
    check_saved_code,
    check_targets,
    expanded,
    find_gguf,
    grant_trust,
    is_local,
)

__all__ = [
    "AUTO",
    "CONF_DIR",
    "PRESETS",
    "SWEEPS_DIR",
    "Config",
    "ConfigError",
    "as_config_errors",
    "build",
    "check_command_line",
    "check_folders",
    "check_keys",
    "check_saved_code",
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
