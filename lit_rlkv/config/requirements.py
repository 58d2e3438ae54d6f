"""What the rules on settings are made of."""

from typing import Any

from lit_rlkv.config.building import ConfigError


def require(is_right: bool, message: str) -> None:
    """Raise the message as a ConfigError unless something holds."""
    if not is_right:
        raise ConfigError(message)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`; YAML's true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether it is a number; YAML's true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
