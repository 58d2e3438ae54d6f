"""From the `parameters` of a W&B sweep file to what is varied and what is constant."""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from lit_rlkv.checks import is_finite, is_whole
from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.parameters import Choice, Interval, Normal, Parameter, WeightedChoice, Whole

Options = Mapping[str, Any]


def parse_parameters(node: Any, prefix: str = "") -> tuple[list[Parameter], dict[str, Any]]:
    """What a sweep varies, in the order of the file, and its constants; nested names are joined by dots.

    Raises:
        ConfigError: naming the parameter that cannot be understood.
    """
    if not isinstance(node, Mapping) or not node:
        where = f"parameters.{prefix.rstrip('.')}" if prefix else "parameters"
        raise ConfigError(f"{where}: {node!r} names nothing to vary; give key: {{values: [...]}}")
    varied: list[Parameter] = []
    constants: dict[str, Any] = {}
    for key, options in node.items():
        name, inner, fixed = f"{prefix}{key}", list[Parameter](), dict[str, Any]()
        if isinstance(options, Mapping) and "parameters" in options:
            inner, fixed = parse_parameters(options["parameters"], f"{name}.")
        elif isinstance(options, Mapping) and "value" in options:
            _take(name, options, ("value",))
            fixed[name] = _plain(name, options["value"])
        else:
            inner.append(_parameter(name, options))
        known = {parameter.name for parameter in varied} | constants.keys()
        if twice := known & ({parameter.name for parameter in inner} | fixed.keys()):
            raise ConfigError(f"parameters.{min(twice)} stands twice, with dots and nested; leave one out")
        varied += inner
        constants |= fixed
    return varied, constants


def _parameter(name: str, options: Any) -> Parameter:
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"parameters.{name}={options!r} says not what to try; give value, values, or min and max"
        )
    kind = options.get("distribution", _implied(options))
    if kind is None and options and all(isinstance(option, Mapping) for option in options.values()):
        inner = next(iter(options))
        raise ConfigError(
            f"parameters.{name}: nested keys stand below `parameters`; give {name}: {{parameters: "
            f"{{{inner}: ...}}}}, or {name}.{inner}: ..."
        )
    if kind is None:
        raise ConfigError(
            f"parameters.{name}: {dict(options)} says not what to try; give value, values, min and max, or a "
            "distribution"
        )
    if kind not in KINDS:
        close = get_close_matches(str(kind), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(KINDS)}"
        raise ConfigError(f"parameters.{name}: unknown distribution {kind!r}; {hint}")
    return KINDS[kind](name, options)


def _implied(options: Options) -> str | None:
    """The distribution that W&B takes where none is named."""
    if "values" in options:
        return "categorical_w_probabilities" if "probabilities" in options else "categorical"
    if {"min", "max"} <= options.keys():
        return "int_uniform" if all(is_whole(options[key]) for key in ("min", "max")) else "uniform"
    return None


def _choice(name: str, options: Options) -> Parameter:
    _take(name, options, ("values",))
    return Choice(name, _values(name, options))


def _weighted(name: str, options: Options) -> Parameter:
    _take(name, options, ("values", "probabilities"))
    values, shares = _values(name, options), options["probabilities"]
    are_shares = isinstance(shares, list) and all(is_finite(share) and share >= 0 for share in shares)
    if not are_shares or len(shares) != len(values) or sum(shares) <= 0:
        raise ConfigError(
            f"parameters.{name}: probabilities={shares} do not go with {len(values)} values; give a number "
            "of at least 0 for each"
        )
    return WeightedChoice(name, values, tuple(shares))


def _whole(name: str, options: Options) -> Parameter:
    low, high = _limits(name, options, ())
    if not (is_whole(low) and is_whole(high)):
        raise ConfigError(f"parameters.{name}: min={low} and max={high} are not whole; use uniform")
    return Whole(name, low, high)


def _interval(
    *, is_log: bool = False, is_exponent: bool = False, is_inverse: bool = False, has_step: bool = False
) -> Callable[[str, Options], Parameter]:
    """A builder; with exponents, `min` and `max` are natural logarithms (of 1/x where it is the inverse)."""

    def make(name: str, options: Options) -> Parameter:
        low, high = _limits(name, options, ("q",) if has_step else ())
        if is_exponent and is_inverse:
            low, high = -high, -low
        if is_exponent:
            low, high = math.exp(low), math.exp(high)
        if is_log and low <= 0:
            raise ConfigError(f"parameters.{name}: min={low} has no logarithm; give more than 0")
        return Interval(name, low, high, log=is_log, step=_step(name, options) if has_step else None)

    return make


def _normal(*, is_log: bool = False, has_step: bool = False) -> Callable[[str, Options], Parameter]:
    def make(name: str, options: Options) -> Parameter:
        _take(name, options, (), ("mu", "sigma", *(("q",) if has_step else ())))
        mu, sigma = _number(name, options, "mu", 0.0), _number(name, options, "sigma", 1.0)
        if sigma <= 0:
            raise ConfigError(f"parameters.{name}: sigma={sigma} varies nothing; give more than 0, or value")
        return Normal(name, mu, sigma, log=is_log, step=_step(name, options) if has_step else None)

    return make


KINDS: dict[str, Callable[[str, Options], Parameter]] = {
    "categorical": _choice,
    "categorical_w_probabilities": _weighted,
    "int_uniform": _whole,
    "uniform": _interval(),
    "q_uniform": _interval(has_step=True),
    "log_uniform": _interval(is_log=True, is_exponent=True),
    "log_uniform_values": _interval(is_log=True),
    "q_log_uniform": _interval(is_log=True, is_exponent=True, has_step=True),
    "q_log_uniform_values": _interval(is_log=True, has_step=True),
    "inv_log_uniform": _interval(is_log=True, is_exponent=True, is_inverse=True),
    "inv_log_uniform_values": _interval(is_log=True),
    "normal": _normal(),
    "q_normal": _normal(has_step=True),
    "log_normal": _normal(is_log=True),
    "q_log_normal": _normal(is_log=True, has_step=True),
}
"""By W&B's names."""


def _values(name: str, options: Options) -> tuple[Any, ...]:
    values = options["values"]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"parameters.{name}: values={values!r} is no list of values to try; give some")
    texts = [str(_plain(name, value)) for value in values]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise ConfigError(f"parameters.{name}: values list {twice} twice; leave one out")
    return tuple(values)


def _plain(name: str, value: Any) -> Any:
    """A value as it stands: what W&B writes on a command line, Hydra must read as it was meant."""
    if value is None:
        raise ConfigError(f"parameters.{name}: null reaches the command as the text None; write 'null'")
    return value


def _limits(name: str, options: Options, optional: tuple[str, ...]) -> tuple[Any, Any]:
    _take(name, options, ("min", "max"), optional)
    low, high = _number(name, options, "min"), _number(name, options, "max")
    if low >= high:
        raise ConfigError(f"parameters.{name}: min={low} is not below max={high}; leave a range between them")
    return low, high


def _step(name: str, options: Options) -> float | int:
    step = _number(name, options, "q", 1)
    if step <= 0:
        raise ConfigError(f"parameters.{name}: q={step} is no step; give more than 0")
    return step


def _number(name: str, options: Options, key: str, default: float | int | None = None) -> Any:
    value = options.get(key, default)
    if not is_finite(value):
        raise ConfigError(
            f"parameters.{name}: {key}={value!r} is no number; YAML reads 1e-5 as a text, write 1.0e-5"
        )
    return value


def _take(name: str, options: Options, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Refuse options that are missing or that the distribution does not take."""
    missing = [key for key in needed if key not in options]
    odd = [str(key) for key in options if key not in (*needed, *optional, "distribution")]
    if missing or odd:
        raise ConfigError(
            f"parameters.{name}: {'missing ' + missing[0] if missing else 'unexpected ' + odd[0]}; it takes "
            f"{', '.join((*needed, *optional)) or 'nothing'}"
        )
