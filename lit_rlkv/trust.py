"""The user's code that a config may name: modules, files, programs; trust lasts as long as the process."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module

KEY = "trusted_modules"
"""Key that grants trust, on the command line only; a saved config never does."""
INSTALLERS = ("pip", "setuptools", "pkg_resources", "wheel")

_trusted: tuple[str, ...] = ()


def trusted_modules() -> tuple[str, ...]:
    """Return the modules and packages that this process trusts."""
    return _trusted


def trust_modules(names: Sequence[str]) -> None:
    """Let configs of this process name classes and functions that these modules or packages define.

    Args:
        names: importable modules or packages, such as `mypackage`, which covers `mypackage.policies`; files
            such as `rewards.py`, command lines such as `sh score.sh` and addresses of services, for reward
            functions of a saved run.

    Raises:
        ValueError: a name is not a module name, or a module of Python or of an installed dependency.
    """
    global _trusted
    for name in names:
        reason = _why_untrustable(name)
        if reason:
            raise ValueError(f"a trusted module must be your own, got {name!r}, {reason}; leave it out")
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


def is_trusted_code(text: str) -> bool:
    """True if exactly this file, command line or address is trusted."""
    return text in _trusted


def can_be_trusted(target: str) -> bool:
    """True if the user may trust the module of a dotted name."""
    return not _why_untrustable(target.partition(".")[0])


def load_trusted_class(target: str) -> type:
    """Import the class of a dotted name.

    Raises:
        ValueError: its module is not trusted, it cannot be imported, or is not a class defined in a trusted
            module: a module also holds what it imports.
    """
    if not is_trusted(target):
        module = target.partition(".")[0]
        raise ValueError(
            f"{target!r} is not from a trusted package; if you trust its code, add {KEY}=[{module}] to the "
            "command line"
        )
    try:
        module, _, name = target.rpartition(".")
        found = getattr(import_module(module), name)
    except Exception as error:
        raise ValueError(f"{target!r} cannot be imported: {error}") from error
    if not isinstance(found, type) or not is_trusted(f"{found.__module__}."):
        raise ValueError(f"{target!r} must be a class defined in {' or '.join(_trusted)}")
    return found


def _why_untrustable(name: str) -> str:
    """Return why a module can never be trusted, an empty text if it can."""
    if not isinstance(name, str) or not name:
        return "which is not the name of a module"
    if "/" in name or " " in name or name.endswith(".py"):
        return ""  # a file, a command line or an address; it trusts only itself
    if not all(part.isidentifier() for part in name.split(".")):
        return "which is not the name of a module"
    top = name.partition(".")[0]
    if top == "lit_rlkv":
        return "which is this package: configs may name its classes already"
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return "which is a module of Python's standard library"
    if top in INSTALLERS or _is_dependency(top):
        return "which is an installed library that lit_rlkv depends on"
    return ""


def _is_dependency(top: str) -> bool:
    """True if a top-level module belongs to a package that lit_rlkv requires, directly or through another."""
    return bool({_normalized(owner) for owner in _owners().get(top, [])} & _required())


@cache
def _owners() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


@cache
def _required() -> set[str]:
    """Return the packages that lit_rlkv and its requirements need, extras included."""
    found: set[str] = set()
    waiting = ["lit-rlkv"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [_normalized(match[0]) for need in needs if (match := re.match(r"[\w.-]+", need))]
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
