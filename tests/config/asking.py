"""Compose a command line of fit, and get its refusal."""

import pytest
from omegaconf import open_dict, read_write

from lit_rlkv.config import ConfigError, check_folders, check_keys, composed
from lit_rlkv.config.composing import initialized
from lit_rlkv.config.keys import check_effects
from lit_rlkv.runs.preflight import checked_config


def asked(*overrides):
    """The config of a command line that passes every check."""
    cfg = composed("config", overrides)
    choices = cfg.hydra.runtime.choices
    with read_write(cfg), open_dict(cfg):
        del cfg["hydra"]
    with initialized():
        check_folders(cfg)
        check_keys(cfg, choices, overrides)
        check_effects(cfg, overrides)
        return checked_config(cfg)


def refusal(*overrides):
    """The one line that is said against a command line."""
    with pytest.raises(ConfigError) as caught:
        asked(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)
