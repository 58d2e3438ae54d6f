"""Values of a config as YAML has them: the schema's defaults, conversion, and walks over containers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import PlainValidator, TypeAdapter, ValidationError

from lit_rlkv.checks import MAX_NUMBER, Number, is_finite, is_number
from lit_rlkv.config.errors import ConfigError, require
from lit_rlkv.settings import InYaml, explain, is_group, keys_of, show

Schema = TypeVar("Schema")
INTERPOLATION = "${"
"""The beginning of a reference to another key or to the environment."""


def _as_node(value: Any) -> DictConfig:
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping")
    return value if isinstance(value, DictConfig) else OmegaConf.create(dict(value))


Node = Annotated[DictConfig, PlainValidator(_as_node)]
"""A node that names a class in `_target_`; the signature of the class says which keys it takes."""


def by_its_group() -> DictConfig:
    """Return the default in Python, which is empty, of a node that an option of a config group gives."""
    return OmegaConf.create()


def default_values(schema: Any, instance: Any = None) -> dict[str, Any]:
    """Return the default of every key as plain YAML values, nested as the classes are.

    Args:
        instance: has the defaults, if they are not those of the class.
    """
    found: dict[str, Any] = {}
    for name, key in keys_of(schema).items():
        own = key.get_default(call_default_factory=True, validated_data={})
        default = own if instance is None else getattr(instance, name)
        in_yaml = ["???"] if key.is_required() else [m.value for m in key.metadata if isinstance(m, InYaml)]
        if is_group(key.annotation):
            found[name] = default_values(key.annotation, default)
        elif in_yaml:
            found[name] = in_yaml[0]
        elif key.default_factory is not by_its_group:
            plain = OmegaConf.to_container(default) if isinstance(default, DictConfig) else default
            found[name] = list(plain) if isinstance(plain, tuple) else plain
    return found


def convert(schema: type[Schema], values: Mapping[str, Any], path: str = "") -> Schema:
    """Return an instance of a schema with these values.

    Args:
        values: resolved and plain; keys that are left out have their default.
        path: of the values in the whole config, for errors.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type or lies outside of its range.
    """
    try:
        return TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        raise ConfigError(explain(error, schema, values, path)) from error


def named_items(node: DictConfig) -> list[tuple[str, Any]]:
    """Return the keys and values of a node, without `_target_` and `_partial_`."""
    return [(str(name), value) for name, value in node.items() if not str(name).startswith("_")]


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
