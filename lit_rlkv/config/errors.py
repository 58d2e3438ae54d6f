"""ConfigError: a mistake of the user, said in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import InstantiationException
from omegaconf.errors import InterpolationResolutionError

from lit_rlkv.checks import OneLineError


class ConfigError(OneLineError, ValueError):
    """A mistake in the configuration: what must hold, what was given, what to do."""


def require(is_right: bool, message: str) -> None:
    """Raise the message as a ConfigError unless something holds."""
    if not is_right:
        raise ConfigError(message)


@contextmanager
def as_config_errors(where: str) -> Iterator[None]:
    """Raise the errors of a constructor or loader as ConfigError, prefixed by the key `where`."""
    try:
        yield
    except ConfigError:
        raise
    except InstantiationException as error:
        raise ConfigError(f"{where}: {one_line(error.__cause__ or error)}") from error
    except (ValueError, TypeError, OSError, ImportError, SystemExit) as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error


@contextmanager
def interpolations_as_config_errors() -> Iterator[None]:
    """Raise the error of a value that refers to nothing as ConfigError, with the key of the value."""
    try:
        yield
    except InterpolationResolutionError as error:
        said = str(error).splitlines()[0]
        raise ConfigError(
            f"{error.full_key}: {said}; give a value, or ${{KEY}} with a key that has one"
        ) from error


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks; that of SystemExit with its type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, Exception) else f"{type(error).__name__}: {text}"
