"""From YAML to objects: trusted targets, checked signatures, rules between fields, all before any work."""

from lit_rlkv.config.building import (
    CONF_DIR,
    PRESETS,
    ConfigError,
    as_config_errors,
    build,
    check_keys,
    check_targets,
    expanded,
)
from lit_rlkv.config.composing import check_command_line, composed, quoted
from lit_rlkv.config.presence import check_folders
from lit_rlkv.config.rewards import build_reward
from lit_rlkv.config.rules import WEIGHT_DTYPES, check_config

__all__ = [
    "CONF_DIR",
    "PRESETS",
    "WEIGHT_DTYPES",
    "ConfigError",
    "as_config_errors",
    "build",
    "build_reward",
    "check_command_line",
    "check_config",
    "check_folders",
    "check_keys",
    "check_targets",
    "composed",
    "expanded",
    "quoted",
]
