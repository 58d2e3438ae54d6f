"""What the rules on settings are made of."""

from lit_rlkv.config.building import ConfigError


def require(is_right: bool, message: str) -> None:
    """Raise the message as a ConfigError unless something holds."""
    if not is_right:
        raise ConfigError(message)
