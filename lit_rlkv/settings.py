"""Settings: frozen dataclasses that pydantic checks, with each of its errors as one sentence.

The docstring below a field is the meaning of the setting, with its unit; errors and documentation quote it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, Field, StrictBool, TypeAdapter, ValidationError

from lit_rlkv.checks import MAX_TEMPERATURE, Number, OneLineError, Range, check_temperature

__all__ = [
    "SAMPLING",
    "Bool",
    "CacheSettings",
    "Fraction",
    "InYaml",
    "Key",
    "MinP",
    "NonNegativeInt",
    "NonNegativeNumber",
    "PositiveInt",
    "PositiveNumber",
    "Sampling",
    "Share",
    "Temperature",
    "Text",
    "TopK",
    "TopP",
    "describe",
    "from_mapping",
    "item_of",
    "keys_of",
    "leaf_keys",
    "settings",
    "show",
]

Schema = TypeVar("Schema")
CHECKED = ConfigDict(arbitrary_types_allowed=True, extra="forbid", use_attribute_docstrings=True)
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
"""Types of pydantic's error for a name that is no field."""

PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveNumber = Annotated[Number, Range(above=0)]
NonNegativeNumber = Annotated[Number, Range(least=0)]
Fraction = Annotated[Number, Range(above=0, below=1)]
Share = Annotated[Number, Range(least=0, most=1)]
Bool = StrictBool
Text = Annotated[str, Field(strict=True, min_length=1)]

if TYPE_CHECKING:
    from dataclasses import dataclass as settings  # which type checkers know
else:

    def settings(**options: Any) -> Any:
        """Make a class a dataclass, as `dataclasses.dataclass` does, whose values pydantic checks.

        The constructor and `dataclasses.replace` raise a ValueError of one line, and lists become tuples.
        """
        from pydantic.dataclasses import dataclass as pydantic_dataclass

        def made(cls: type) -> type:
            checked = pydantic_dataclass(cls, config=CHECKED, **options)
            validate = checked.__init__

            @wraps(validate)
            def __init__(self: Any, *args: Any, **values: Any) -> None:
                try:
                    validate(self, *args, **values)
                except ValidationError as error:
                    names = [each.name for each in fields(checked) if not each.kw_only]
                    given = dict(zip(names, args, strict=False)) | values
                    raise ValueError(explain(error, checked, given)) from None

            checked.__init__ = __init__
            return checked

        return made


@dataclass(frozen=True)
class InYaml:
    """Default in YAML if it differs from the dataclass's: an interpolation such as `${seed}`."""

    value: str


@dataclass(frozen=True)
class Key:
    """A setting: a field of a class made by `settings`."""

    name: str
    kind: Any
    """Its type, with `Annotated`."""
    help: str
    """Meaning and unit."""
    default: Any
    """MISSING if it must be given."""
    yaml: str | None
    """Default in YAML if it is another."""
    makes_default: Any
    """Function that makes the default; None for a constant."""

    @property
    def is_group(self) -> bool:
        """True if its value is an instance of a class with settings of its own."""
        return is_dataclass(self.kind)


def keys_of(schema: type) -> Iterator[Key]:
    """Yield the settings of a class; fields that are not compared are none."""
    hints = get_type_hints(schema, include_extras=True)
    declared = [vars(base).get("__pydantic_fields__", {}) for base in schema.__mro__]
    for each in fields(schema):
        if each.compare or not each.init:
            kind, factory = hints[each.name], each.default_factory
            marks = get_args(kind) if get_origin(kind) is Annotated else ()
            yaml = next((mark.value for mark in marks if isinstance(mark, InYaml)), None)
            # A class has no docstrings of the fields that it inherits.
            said = [own[each.name].description or "" for own in declared if each.name in own]
            meaning = " ".join(next(filter(None, said), "").split())
            makes = None if factory is MISSING else factory
            yield Key(each.name, kind, meaning, makes() if makes else each.default, yaml, makes)


def leaf_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield the dotted name and the declaration of each setting of a class and of those below it."""
    for key in keys_of(schema):
        if key.is_group:
            yield from leaf_keys(key.kind, f"{prefix}{key.name}.")
        else:
            yield f"{prefix}{key.name}", key


def from_mapping(schema: type[Schema], values: Mapping[str, Any], path: str = "") -> Schema:
    """Return an instance of a class with these values, nested as its fields are.

    Args:
        values: plain; settings that are left out have their default.
        path: of the values in a whole config, for errors.

    Raises:
        ValueError: a name is unknown or missing, or a value has the wrong type or lies outside of its range.
    """
    try:
        return TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        raise ValueError(explain(error, schema, values, path)) from error


def explain(error: ValidationError, schema: type, values: Any, path: str = "") -> str:
    """Return the first error as a sentence: what must hold, what was given, what the setting means.

    Args:
        values: that were checked.
        path: of the values in a whole config.
    """
    errors = error.errors()
    first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])
    where, kind, value, meaning = path, schema, values, ""
    places = list(first["loc"])
    while places and is_dataclass(kind):
        keys, above, name = {key.name: key for key in keys_of(kind)}, where, places.pop(0)
        if not isinstance(name, str):  # of an argument without a name
            return str(first["msg"])
        where = f"{above}.{name}" if above else name
        if name not in keys:
            close = get_close_matches(name, keys, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return f"unknown key {where!r}; {above or 'it'} takes {', '.join(keys)}{hint}"
        if name not in value:
            return f"{where} is missing; give it ({keys[name].help})"
        kind, meaning, value = keys[name].kind, keys[name].help, value[name]
    if is_dataclass(kind):
        cause = first.get("ctx", {}).get("error")
        if cause is not None:  # a rule between settings
            return str(cause) if isinstance(cause, OneLineError) or not where else f"{where}: {cause}"
        return f"{where} must have the keys {', '.join(key.name for key in keys_of(kind))}, got {show(value)}"
    example, item = "", item_of(kind)
    if item is not None and _is_list(value):
        # A union has an error for each of its types: that of the items counts.
        items = [place for each in errors for place in each["loc"] if isinstance(place, int)]
        kind, value, where = item, value[items[0]], f"{where}[{items[0]}]"
    elif item is not None:
        example = f"; write {where}=[{show(value)}]"
    return f"{where} must be {describe(kind, value)}, got {show(value)} ({meaning}){example}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def item_of(kind: Any) -> Any:
    """Return the type of the items if a setting may be a list; None otherwise."""
    if get_origin(kind) is tuple:
        return get_args(kind)[0]
    is_deeper = get_origin(kind) in (Union, UnionType, Annotated)
    return next((item for one in get_args(kind) if (item := item_of(one))), None) if is_deeper else None


def describe(kind: Any, value: Any = None) -> str:
    """Return in words what a setting may be: its type with its range, and a limit that `value` is beyond."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        ranges = [mark for mark in args if isinstance(mark, Range)]
        return ranges[0].describe(args[0], value) if ranges else describe(args[0], value)
    if origin in (Union, UnionType):
        *words, last = (describe(one, value) for one in args)
        return f"{', '.join(words)} or {last}"
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(map(show, args))}"
    if origin is tuple:
        return f"a list, each {describe(args[0], value)}"
    return {NoneType: "null", bool: "true or false", str: "a text"}.get(kind, "a mapping")


def show(value: Any) -> str:
    """Return a value as YAML writes it, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(one) for one in value)}]"
    return str(value) or "''"


TopK = PositiveInt
TopP = Annotated[Number, Range(above=0, most=1)]
MinP = Annotated[Number, Range(least=0, below=1)]
Temperature = Annotated[Number, Range(least=0, most=MAX_TEMPERATURE)]


@settings(frozen=True)
class Sampling:
    """How tokens are drawn, as in transformers: divided by `temperature`, then `top_k`, `top_p` and `min_p`.

    Each of these restricts the distribution that the ones before leave, renormalised, and keeps the likeliest
    token.

    Raises:
        ValueError: a number is out of its range.
    """

    temperature: Temperature = 1.0
    """divides the logits before sampling; 0: greedy"""
    top_k: TopK | None = None
    """sample from so many likeliest tokens, never more if some are equally likely; null: from all"""
    top_p: TopP = 1.0
    """then from the fewest likeliest tokens with this probability; 1: all"""
    min_p: MinP | None = None
    """then from tokens with this part of the highest probability; null: all"""

    def __post_init__(self) -> None:
        check_temperature("temperature", self.temperature, is_greedy_allowed=True)

    @property
    def is_restricted(self) -> bool:
        """True if a token may be dropped."""
        return self.top_k is not None or self.top_p < 1 or bool(self.min_p)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `lit_rlkv.generate` that sample so."""
        return {name: getattr(self, name) for name in SAMPLING}


SAMPLING = tuple(each.name for each in fields(Sampling))
"""Names of the settings of sampling."""


@settings(frozen=True)
class CacheSettings:
    """Size and eviction policy of a KV cache, per sequence, layer and KV head; see `lit_rlkv.CacheSpec`."""

    policy: Text = "snapkv"
    """streaming h2o snapkv rkv tova knorm keydiff expected vase gkv random learned dense, or
    mypackage.policies.MyPolicy"""
    budget: PositiveInt = 512
    """keys that survive a compaction"""
    interval: PositiveInt = 128
    """tokens written between compactions"""
    sink: NonNegativeInt = 4
    """first tokens, never evicted"""
    window: PositiveInt = 16
    """last tokens, never evicted, and the queries that policies look at"""
    protect_prompt: Bool = False
    """never evict keys of the prompt, and count only those after it in the budget"""
    policy_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """arguments of the policy's constructor"""
    budget_profile: Literal["pyramid"] | tuple[PositiveInt, ...] | None = None
    """budgets by layer, with budget as their mean: pyramid gives lower layers more (arXiv:2406.02069), a
    number for each layer without a window gives them in proportion; null: all the same"""
    dtype: Literal["int8", "fp8", "int4"] | None = None
    """int8, fp8 or int4: quantizes keys and values as they arrive, which the learner replays; null: they
    stay in the model's dtype"""
