"""Settings: frozen dataclasses that pydantic checks, with each of its errors as one sentence.

The docstring below a field is the meaning of the setting, with its unit; errors and documentation quote it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, StrictBool, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lit_rlkv.checks import MAX_TEMPERATURE, Number, OneLineError, Range, check_temperature

DENSE = "dense"
"""Name that stands for no eviction policy: every key is kept."""
CHECKED = ConfigDict(arbitrary_types_allowed=True, extra="forbid", use_attribute_docstrings=True)
UNKNOWN = "unexpected_keyword_argument"
"""Type of pydantic's error for a name that is no field."""

PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveNumber = Annotated[Number, Range(above=0)]
NonNegativeNumber = Annotated[Number, Range(least=0)]
Fraction = Annotated[Number, Range(above=0, below=1)]
Share = Annotated[Number, Range(least=0, most=1)]
Bool = StrictBool
Text = Annotated[str, Field(strict=True, min_length=1)]

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(**options: Any) -> Any:
        """Make a class a dataclass, as `dataclasses.dataclass` does, whose values pydantic checks.

        The constructor and `dataclasses.replace` raise a ValueError of one line, and lists become tuples.
        """
        from pydantic.dataclasses import dataclass as pydantic_dataclass

        def made(cls: type) -> type:
            checked = pydantic_dataclass(cls, config=CHECKED, **options)
            for name, key in checked.__pydantic_fields__.items():
                inherited = (vars(base).get("__pydantic_fields__", {}).get(name) for base in checked.__mro__)
                said = [each.description for each in inherited if each is not None and each.description]
                key.description = " ".join(said[0].split()) if said else None
            validate = checked.__init__

            @wraps(validate)
            def __init__(self: Any, *args: Any, **values: Any) -> None:
                try:
                    validate(self, *args, **values)
                except ValidationError as error:
                    given = dict(zip(_positional(checked), args, strict=False)) | values
                    raise ValueError(explain(error, checked, given, write=repr)) from None

            __init__.__signature__ = inspect.signature(checked)
            checked.__init__ = __init__
            return checked

        return made


@dataclasses.dataclass(frozen=True)
class InYaml:
    """Default in YAML if it differs from the dataclass's: an interpolation such as `${seed}`."""

    value: str


def keys_of(schema: Any) -> dict[str, FieldInfo]:
    """Return the settings of a class by name; fields that are excluded are none."""
    return {name: key for name, key in schema.__pydantic_fields__.items() if not key.exclude}


def leaf_keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the declaration of each setting of a class and of those below it."""
    for name, key in keys_of(schema).items():
        if is_group(key.annotation):
            yield from leaf_keys(key.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", key


def is_group(kind: Any) -> bool:
    """True for the type of a setting that has settings of its own."""
    return dataclasses.is_dataclass(kind)


def _positional(schema: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(schema) if not each.kw_only]


def explain(
    error: ValidationError,
    schema: Any,
    values: Any,
    path: str = "",
    write: Callable[[Any], str] | None = None,
) -> str:
    """Return the first error as a sentence: what must hold, what was given, what the setting means.

    Args:
        values: that were checked.
        path: of the values in a whole config.
        write: returns a value as text; None: as YAML writes it.
    """
    write = write or show
    errors = error.errors()
    first = next((each for each in errors if each["type"] == UNKNOWN), errors[0])
    where, kind, value, meaning = path, schema, values, ""
    places = list(first["loc"])
    while places and is_group(kind):
        keys, above, name = keys_of(kind), where, places.pop(0)
        if isinstance(name, int):  # the place of an argument that is given without its name
            names = _positional(kind)
            if name >= len(names):
                return f"{kind.__name__} takes {len(names)} arguments without a name, got more"
            name = names[name]
        where = f"{above}.{name}" if above else name
        if name not in keys:
            close = get_close_matches(name, keys, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return f"unknown key {where!r}; {above or 'it'} takes {', '.join(keys)}{hint}"
        meaning = keys[name].description or ""
        if name not in value:
            return f"{where} is missing; give it ({meaning})"
        kind, value = keys[name].rebuild_annotation(), value[name]
    if is_group(kind):
        cause = first.get("ctx", {}).get("error")
        if cause is None:
            return f"{where} must have the keys {', '.join(keys_of(kind))}, got {write(value)}"
        is_whole_sentence = isinstance(cause, OneLineError) or not where
        return str(cause) if is_whole_sentence else f"{where}: {cause}"
    example, item = "", item_of(kind)
    if item is not None and _is_list(value):
        # A union has an error for each of its types: that of the items counts.
        depth = len(first["loc"]) - len(places)
        own = [each["loc"] for each in errors if each["loc"][:depth] == first["loc"][:depth]]
        n = next(place for loc in own for place in loc[depth:] if isinstance(place, int))
        kind, value, where = item, value[n], f"{where}[{n}]"
    elif item is not None and _is_of(item, value):
        example = f"; write {where}=[{write(value)}]"
    return f"{where} must be {describe(kind, value)}, got {write(value)} ({meaning}){example}"


def _is_of(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


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


@dataclass(frozen=True)
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


SAMPLING = tuple(each.name for each in dataclasses.fields(Sampling))
"""Names of the settings of sampling."""


@dataclass(frozen=True)
class CacheSettings:
    """Size and eviction policy of a KV cache, per sequence, layer and KV head; see `lit_rlkv.CacheSpec`."""

    policy: Text = "snapkv"
    """streaming h2o snapkv rkv tova knorm keydiff expected triattention vase gkv random learned dense, or
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
    policy_options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """arguments of the policy's constructor, such as cache.policy_options.value_norms=true"""
    budget_profile: Literal["pyramid"] | tuple[PositiveInt, ...] | None = None
    """budgets by layer, with budget as their mean: pyramid gives lower layers more (arXiv:2406.02069), a
    number for each layer without a window gives them in proportion; null: all the same"""
    dtype: Literal["int8", "fp8", "int4"] | None = None
    """int8, fp8 or int4: quantizes keys and values as they arrive, which the learner replays; null: they
    stay in the model's dtype"""


def cache_label(policy: str, cache: Mapping[str, Any]) -> str:
    """Return the name of a cache in tables and plots, and of its random numbers in evaluations.

    Args:
        policy: its name, without a module.
        cache: values of `CacheSettings`; those that are missing have no say.
    """
    options, profile = cache.get("policy_options") or {}, cache.get("budget_profile") or ""
    parts = [policy, cache.get("dtype")]
    if policy != DENSE:
        shares = profile if isinstance(profile, str) else "-".join(map(str, profile))
        size = f"{'prompt+' * bool(cache.get('protect_prompt'))}{cache['budget']}+{cache['interval']}"
        parts[1:1] = [*(f"{name}={show(value)}" for name, value in sorted(options.items())), shares, size]
    return " ".join(filter(None, parts))
