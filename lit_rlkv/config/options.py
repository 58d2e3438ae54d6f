"""A config schema of documented dataclasses: defaults, types, ranges, and conversion from YAML."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import MAX_NUMBER, Number, Range, is_finite, is_number
from lit_rlkv.config.errors import require

Schema = TypeVar("Schema")
Node = DictConfig
"""A node that names a class in `_target_`; the signature of the class says which keys it takes."""
INTERPOLATION = "${"
"""The beginning of a reference to another key or to the environment."""
_META = "option"


@dataclass(frozen=True, kw_only=True)
class Option(Range):
    """Meaning, range and default of one key."""

    help: str = ""
    """Meaning and unit, in one line."""
    yaml: Any = None
    """Default in YAML if it differs from the dataclass's: an interpolation such as `${seed}`."""
    is_chosen: bool = False
    """True if the option of a config group gives the value, so that it has no default."""


def option(default: Any, help: str, *, yaml: Any = None, **bounds: Number) -> Any:
    """Declare a key of a config: a dataclass field with a meaning and a range.

    Args:
        default: MISSING for none; None also says that null is allowed; a list or dict is copied.
        help: meaning and unit, in one line.
        yaml: default in YAML, where another key decides it, such as `${seed}`.
        bounds: least, above, most and below, as in `Range`.
    """
    metadata = {_META: Option(help=help, yaml=yaml, **cast(Any, bounds))}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(schema: type) -> Any:
    """Declare a node with a schema of its own."""
    return field(default_factory=schema, metadata={_META: Option()})


def chosen(help: str) -> Any:
    """Declare a node that the chosen option of a config group gives; empty in Python."""
    return field(default_factory=OmegaConf.create, metadata={_META: Option(help=help, is_chosen=True)})


def default_values(schema: type) -> dict[str, Any]:
    """Return the default of every key as plain YAML values, nested as the dataclasses are."""
    found: dict[str, Any] = {}
    for name, each, declared, kind in keys_of(schema):
        if is_dataclass(kind):
            found[name] = default_values(cast(type, kind))
        elif declared.yaml is not None:
            found[name] = declared.yaml
        elif not declared.is_chosen:
            value = each.default if each.default_factory is MISSING else each.default_factory()
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def keys_of(schema: type) -> Iterator[tuple[str, Field[Any], Option, Any]]:
    """Yield name, field, declaration and type of every key of a schema."""
    hints = get_type_hints(schema)
    for each in fields(schema):
        if _META in each.metadata:
            yield each.name, each, each.metadata[_META], hints[each.name]


def convert(schema: type[Schema], values: Mapping[str, Any], path: str = "", **others: Any) -> Schema:
    """Return an instance of a schema with these values.

    Args:
        values: resolved and plain; keys that are left out have their default.
        path: of the values in the whole config, for errors.
        others: fields of the dataclass that are not keys.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type or lies outside of its range.
    """
    prefix = f"{path}." if path else ""
    keys = {name: (each, declared, kind) for name, each, declared, kind in keys_of(schema)}
    require(isinstance(values, Mapping), f"{path} must have the keys {', '.join(keys)}, got {show(values)}")
    unknown = next((name for name in values if name not in keys), None)
    require(unknown is None, f"unknown key '{prefix}{unknown}'; {path or 'it'} takes {', '.join(keys)}")
    arguments: dict[str, Any] = {}
    for name, (each, declared, kind) in keys.items():
        if name not in values:
            has_default = not (each.default is each.default_factory is MISSING)
            require(has_default, f"{prefix}{name} is missing; give it ({declared.help})")
        elif is_dataclass(kind):
            arguments[name] = convert(cast(type, kind), values[name], f"{prefix}{name}")
        else:
            arguments[name] = _converted(f"{prefix}{name}", values[name], kind, declared)
    return schema(**arguments, **others)


def check_values(config: Any) -> None:
    """Check an instance of a schema that was made in Python, where nothing has checked its values.

    Raises:
        ConfigError: a value has the wrong type or lies outside of its range.
    """
    for name, _, declared, kind in keys_of(type(config)):
        if not is_dataclass(kind):
            _converted(name, getattr(config, name), kind, declared)


def named_items(node: DictConfig) -> list[tuple[str, Any]]:
    """Return the keys and values of a node, without `_target_` and `_partial_`."""
    return [(str(name), value) for name, value in node.items() if not str(name).startswith("_")]


def _converted(where: str, value: Any, kind: Any, declared: Option) -> Any:
    """Return a value as its type has it.

    Raises:
        ConfigError: the value has another type, or lies outside of its range.
    """
    item = next((get_args(one)[0] for one in _alternatives(kind) if get_origin(one) is tuple), None)
    if item is not None and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_converted(f"{where}[{n}]", one, item, declared) for n, one in enumerate(value))
    example = "" if item is None else f"; write {where}=[{show(value)}]"
    require(
        any(_is_of(value, one, declared) for one in _alternatives(kind)),
        f"{where} must be {describe(kind, declared, value)}, got {show(value)} ({declared.help}){example}",
    )
    return OmegaConf.create(dict(value)) if isinstance(value, Mapping) else value


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_of(value: Any, kind: Any, declared: Option) -> bool:
    """True if a value has one of the types that a key may have, and lies in its range."""
    if kind is NoneType:
        return value is None
    if get_origin(kind) is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(kind))
    if kind is bool or kind is str:
        return isinstance(value, kind) and value != ""
    if kind in (int, float):
        return declared.holds(value, kind)
    return kind is Node and isinstance(value, Mapping)


def describe(kind: Any, declared: Option, value: Any = None) -> str:
    """Return in words what a key may be: its type with its range, and the limit that `value` is beyond."""
    kinds = _alternatives(kind)
    # A float includes whole numbers, so `float | int` is said once.
    words = [_word(one, declared, value) for one in kinds if not (one is int and float in kinds)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _word(kind: Any, declared: Option, value: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list, each {describe(get_args(kind)[0], declared, value)}"
    if get_origin(kind) is Literal:
        values = [show(one) for one in get_args(kind)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if kind in (int, float):
        return declared.describe(kind, value)
    return {NoneType: "null", bool: "true or false", str: "a text"}.get(kind, "a mapping")


def show(value: Any) -> str:
    """Return a value as YAML writes it, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(one) for one in value)}]"
    return str(value) or "''"


def leaf_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, Option]]:
    """Yield the dotted key, the type and the declaration of each key of a schema and of those below it."""
    for name, _, declared, kind in keys_of(schema):
        if is_dataclass(kind):
            yield from leaf_keys(cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind, declared


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a container; lists and empty mappings are leaves."""
    if not isinstance(node, Mapping) or not node:
        yield key, node
        return
    for name, value in node.items():
        yield from leaves(value, f"{key}.{name}" if key else str(name))


def check_leaves(node: Any, key: str = "") -> None:
    """Check that the values of a container are plain: finite numbers, and texts that refer to no other key.

    A saved config is read once more, and would resolve a reference then.

    Raises:
        ConfigError: naming the first value that is not.
    """
    for name, leaf in leaves(node, key):
        is_plain = INTERPOLATION not in str(leaf)
        require(is_plain, f"{name}={show(leaf)} refers to another key by {INTERPOLATION!r}; write its value")
        require(
            all(is_finite(number) and abs(number) <= MAX_NUMBER for number in _numbers(leaf)),
            f"{name} must have finite numbers of at most {MAX_NUMBER:g} in size, got {show(leaf)}",
        )


def _numbers(value: Any) -> Iterator[Number]:
    """Yield a number, or those in a list or mapping."""
    if is_number(value):
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in items:
        yield from _numbers(item)
