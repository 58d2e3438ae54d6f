"""What the command line of fit asks for, and what is said against it."""

import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, ConfigError, check_command_line, check_config, check_folders, check_keys


def asked(*overrides):
    """The config of a command line that passes every check."""
    check_command_line("config", overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        full = compose("config", overrides=[*overrides], return_hydra_config=True)
        cfg = compose("config", overrides=[*overrides])
        check_folders(cfg)
        check_keys(cfg, full.hydra.runtime.choices, overrides)
        check_config(cfg)
    return cfg


def refusal(*overrides):
    """The one line that is said against a command line."""
    with pytest.raises(ConfigError) as caught:
        asked(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)
