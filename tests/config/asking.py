"""Compose a command line of fit, and get its refusal."""

import pytest
from hydra import initialize_config_dir
from omegaconf import open_dict, read_write

from lit_rlkv.config import CONF_DIR, ConfigError, check_command_line, check_folders, check_keys
from lit_rlkv.runs.preflight import checked_config


def asked(*overrides):
    """The config of a command line that passes every check."""
    cfg = check_command_line("config", overrides)
    assert cfg is not None, "options for Hydra alone ask for no config"
    choices = cfg.hydra.runtime.choices
    with read_write(cfg), open_dict(cfg):
        del cfg["hydra"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        check_folders(cfg)
        check_keys(cfg, choices, overrides)
        return checked_config(cfg)


def refusal(*overrides):
    """The one line that is said against a command line."""
    with pytest.raises(ConfigError) as caught:
        asked(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)
