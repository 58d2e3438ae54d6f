"""Settings of the command line as a recipe: a file in conf/recipe/ that `recipe=NAME` chooses."""

from collections.abc import Sequence

from omegaconf import OmegaConf

from lit_rlkv.config import ConfigError
from lit_rlkv.config.composing import options_of


def recipe(overrides: Sequence[str], command: str) -> str:
    """Return the YAML of a recipe with these overrides.

    Raises:
        ConfigError: an override takes a key away.
    """
    defaults: list[str] = []
    settings: list[str] = []
    for override in overrides:
        key, is_set, value = override.lstrip("+").partition("=")
        if not is_set:
            raise ConfigError(f"{override} cannot stand in a recipe; leave to=... out")
        if key == "recipe":
            defaults.insert(0, value)
        elif options_of(key):
            defaults.append(f"override /{key}: {value}")
        else:
            settings.append(f"{key}={value}")
    lines = ["# @package _global_", f"# {command}"]
    if defaults:
        lines += ["defaults:", *(f"  - {default}" for default in defaults), ""]
    return "\n".join(lines) + "\n" + OmegaConf.to_yaml(OmegaConf.from_dotlist(settings))
