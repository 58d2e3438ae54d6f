"""From YAML to objects: composition, trusted targets, checked signatures; without torch or transformers.

The checks of whole configs need these and are in `lit_rlkv.config.rules`.
"""

from lit_rlkv.config.building import (
    CONF_DIR,
    PRESETS,
    ConfigError,
    as_config_errors,
    build,
    check_keys,
    check_targets,
    expanded,
    grant_trust,
)
from lit_rlkv.config.composing import check_command_line, composed, quoted
from lit_rlkv.config.presence import check_folders

__all__ = [
    "CONF_DIR",
    "PRESETS",
    "ConfigError",
    "as_config_errors",
    "build",
    "check_command_line",
    "check_folders",
    "check_keys",
    "check_targets",
    "composed",
    "expanded",
    "grant_trust",
    "quoted",
]
