"""The user's code that a config may name: modules, files, services; trust lasts as long as the process."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

KEY = "trusted_modules"
"""Key that grants trust, on the command line only; a saved config never does."""

_trusted: tuple[str, ...] = ()


def trusted_modules() -> tuple[str, ...]:
    """Return the modules and packages that this process trusts."""
    return _trusted


def trust_modules(names: Sequence[str]) -> None:
    """Let configs of this process name classes and functions that these modules or packages define.

    Args:
        names: importable modules or packages, such as `mypackage`, which covers `mypackage.policies`; files
            such as `rewards.py` and addresses of services, for reward functions of a saved run.

    Raises:
        ValueError: a name is empty, or a module of Python's standard library, which runs programs.
    """
    global _trusted
    for name in names:
        is_python = str(name).partition(".")[0] in sys.stdlib_module_names and not str(name).endswith(".py")
        if not isinstance(name, str) or not name or is_python:
            raise ValueError(f"a trusted module must be your own, got {name!r}; leave it out")
    _trusted = tuple(dict.fromkeys([*_trusted, *names]))


@contextmanager
def trusting(names: Sequence[str]) -> Iterator[None]:
    """Trust these modules inside the `with` block only."""
    global _trusted
    before = _trusted
    trust_modules(names)
    try:
        yield
    finally:
        _trusted = before


def is_trusted(target: str) -> bool:
    """True if a dotted name lies in a trusted module or package."""
    return target.startswith(tuple(f"{name}." for name in _trusted))


def load_trusted(target: str, kind: str = "a function") -> Any:
    """Import what a dotted name means.

    Args:
        kind: what it should be, for errors.

    Raises:
        ValueError: its module is not trusted, it cannot be imported, or it is not defined in a trusted
            module: a module also holds what it imports.
    """
    if not is_trusted(target):
        key = f"{KEY}=[{target.partition('.')[0]}]"
        raise ValueError(f"{target!r} is not from a trusted package; if you trust its code, add {key}")
    try:
        found = located(target)
    except Exception as error:
        raise ValueError(f"{target!r} cannot be imported: {error}") from error
    if not is_trusted(f"{getattr(found, '__module__', None)}."):
        raise ValueError(f"{target!r} must be {kind} defined in {' or '.join(_trusted)}")
    return found


def load_trusted_class(target: str) -> type:
    """Import the class of a dotted name.

    Raises:
        ValueError: see `load_trusted`, or it is no class.
    """
    found = load_trusted(target, "a class")
    if not isinstance(found, type):
        raise ValueError(f"{target!r} must be a class, got {found!r}")
    return found


def located(target: str) -> Any:
    """Import the module of a dotted name, and return what the name means in it."""
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)
