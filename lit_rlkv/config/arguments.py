"""The form of command lines: settings are written key=value, and what is written otherwise is refused."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lit_rlkv.config.composing import (
    SEVERAL,
    composed,
    groups,
    hint_at,
    initialized,
    known_keys,
    options_of,
)
from lit_rlkv.config.errors import ConfigError
from lit_rlkv.config.hints import meant

VIEWS = {"--cfg", "-c", "--package", "-p"}
"""Options of Hydra with a value of their own, which print the config."""
LEFT_TO_HYDRA = {"--help", "-h", "--info", "-i", "--hydra-help", "--version", "-sc", "--shell-completion"}
"""Options of Hydra that print and compose no config."""
OF_HYDRA = ("config-name", "config-path", "config-dir", "cn", "cp", "cd", "experimental-rerun", "run")
"""Options of Hydra that do not serve here."""
OWN_FOLDERS = {"evaluate": ("ckpt",), "export": ("ckpt", "to")}
"""The keys that a program's folders belong to, in the order in which people write them."""


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
    for place, argument in enumerate(overrides):
        if argument.startswith("-") or ("=" not in argument and not argument.startswith("~")):
            with initialized():
                raise ConfigError(_as_setting(name, overrides, place))
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


def _as_setting(name: str, arguments: Sequence[str], place: int) -> str:
    """Return how an argument is written that is no setting."""
    argument = arguments[place]
    after = arguments[place + 1] if place + 1 < len(arguments) else ""
    following = "" if after.startswith("-") or "=" in after else after
    if argument.startswith("-"):
        return _flag(name, argument, following)
    if argument == "help":
        return "'help' sets nothing; write --help"
    if name in OWN_FOLDERS and argument not in known_keys(name):
        given = [one for one in arguments if "=" not in one and not one.startswith(("-", "~"))]
        settings = [f"{key}={value}" for key, value in zip(OWN_FOLDERS[name], given, strict=False)]
        return f"{argument!r} sets nothing; write {' '.join(settings)}"
    return f"{argument!r} sets nothing; {_word(name, argument, following)}"


def _flag(name: str, flag: str, following: str) -> str:
    key, sign, value = flag.lstrip("-").partition("=")
    if key in OF_HYDRA:
        return (
            f"--{key} has no effect here; choose by group=option, such as experiment=smd; --help lists them"
        )
    value = value if sign else following
    shown = flag if sign or not following else f"{flag} {following}"
    key = key.replace("-", "_")
    return (
        f"{shown!r}: settings are written key=value, without dashes; {_written(name, key, value or 'true')}"
    )


def _word(name: str, word: str, following: str) -> str:
    """Return how a word is written that is no setting: a key, an option, a folder or a model."""
    if options := options_of(word):
        return f"write {word}={following if following in options else '...'}"
    if word in known_keys(name):
        return f"write {word}={following or '...'}"
    having = [f"{group}={word}" for group in groups() if word in options_of(group)]
    if having:
        return f"write {' or '.join(sorted(having, key=lambda one: not one.startswith('experiment')))}"
    if (Path(word) / "config.yaml").is_file():
        return f"write resume={word} to resume the run"
    if "/" in word:
        return f"write key=value, such as model.path={word} or resume={word}"
    return _written(name, word, following or "...")


def _written(name: str, key: str, value: str) -> str:
    """Return a key and its value as they are written here."""
    known = known_keys(name)
    is_known = key in known or (name == "config" and key in groups())
    found = [key] if is_known else meant(key, known)
    if len(found) == 1:
        return f"write {found[0]}={value}"
    return f"{key}: {hint_at(key, name)}"
