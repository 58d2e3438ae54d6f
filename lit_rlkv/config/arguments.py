"""The form of command lines: settings are written key=value, and what is written otherwise is refused."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lit_rlkv.config.composing import SEVERAL, composed, groups, hint_at, initialized, known_keys, options_of
from lit_rlkv.config.errors import ConfigError

VIEWS = {"--cfg", "-c", "--package", "-p"}
"""Options of Hydra with a value of their own, which print the config."""
LEFT_TO_HYDRA = {"--help", "-h", "--info", "-i", "--hydra-help", "--version", "-sc", "--shell-completion"}
"""Options of Hydra that print and compose no config."""
FOLDER_KEYS = {"config": "resume", "evaluate": "ckpt", "export": "ckpt"}
"""The key that a run's folder belongs to."""


def check_command_line(name: str, arguments: Sequence[str]) -> DictConfig | None:
    """Return the config of a program, composed before Hydra does that; None if Hydra alone is to answer.

    Options such as --info print and compose no config.

    Raises:
        ConfigError: it does not compose, is written otherwise than key=value, or asks for several runs.
    """
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError(f"--multirun: {SEVERAL}")
    if LEFT_TO_HYDRA & {argument.partition("=")[0] for argument in arguments}:
        return None
    overrides = _without_views(arguments)
    for argument in overrides:
        if argument.startswith("-") or ("=" not in argument and not argument.startswith("~")):
            with initialized():
                raise ConfigError(f"{argument!r} sets nothing: {_as_setting(name, argument)}")
    return composed(name, overrides)


def _without_views(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without options that ask to see the config, `--cfg job` and `--resolve`."""
    rest = list(arguments)
    for place, argument in reversed([*enumerate(arguments)]):
        if argument in VIEWS:
            del rest[place : place + 2]
        elif argument.partition("=")[0] in VIEWS or argument == "--resolve":
            del rest[place]
    return rest


def _as_setting(name: str, argument: str) -> str:
    """Return how an argument is written that is no setting: a flag, a key, an option, a folder or a model."""
    word, _, value = argument.lstrip("-").partition("=")
    key = word.replace("-", "_")
    having = [f"{group}={word}" for group in groups() if word in options_of(group)]
    if "/" in word or (Path(word) / "config.yaml").is_file():
        model = f" or model.path={word}" if name == "config" else ""
        return f"write {FOLDER_KEYS[name]}={word}{model}"
    if key in known_keys(name) or options_of(key):
        return f"write {key}={value or '...'}"
    if having:
        return f"write {' or '.join(having)}"
    return f"settings are written key=value, without dashes; {hint_at(key, name)}"
