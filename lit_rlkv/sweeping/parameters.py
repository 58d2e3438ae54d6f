"""The `parameters` of a W&B sweep file: what a sweep varies, and which values it can draw.

The distributions are W&B's, so that a file means the same there and here. Optuna has no quantised, inverse,
normal or weighted ones: it draws a number within `bounds`, or a label, and `Parameter.value` maps the draw to
a value.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from itertools import accumulate, product
from statistics import NormalDist
from typing import Any

from lit_rlkv.checks import Number, is_finite, is_whole
from lit_rlkv.config import ConfigError, require
from lit_rlkv.config.options import convert, option

Drawn = float | int | str
"""A draw of the sampler: a number within bounds, or the label of a listed value."""
TAIL = 1e-6
"""Probability that is cut off at both ends of a normal distribution."""
MAX_CORNERS = 64
"""Largest number of extreme combinations to check; beyond it, one parameter at a time is extreme."""
YAML_FLOAT = "; YAML reads '1e-5' as a text, write 1.0e-5"


@dataclass(frozen=True, kw_only=True)
class Between:
    """Limits of a distribution: of values, or of their logarithms for the kinds in `EXPONENTS`."""

    min: Number = option(MISSING, f"smallest value{YAML_FLOAT}")
    max: Number = option(MISSING, f"largest value{YAML_FLOAT}")


@dataclass(frozen=True, kw_only=True)
class IntBetween:
    """Limits of integers, both included."""

    min: int = option(MISSING, "smallest value; use uniform for others")
    max: int = option(MISSING, "largest value; use uniform for others")


@dataclass(frozen=True, kw_only=True)
class SteppedBetween(Between):
    """Limits of a distribution of multiples."""

    q: Number = option(1, "values are multiples of it", above=0)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Mean and standard deviation, of the logarithm for log_normal and q_log_normal."""

    mu: Number = option(0.0, f"mean{YAML_FLOAT}")
    sigma: Number = option(1.0, f"standard deviation{YAML_FLOAT}", above=0)


@dataclass(frozen=True, kw_only=True)
class SteppedGaussian(Gaussian):
    """Mean and standard deviation of a distribution of multiples."""

    q: Number = option(1, "values are multiples of it", above=0)


LISTED = ("categorical", "categorical_w_probabilities")
NUMERIC: dict[str, type] = {
    "int_uniform": IntBetween,
    "uniform": Between,
    "q_uniform": SteppedBetween,
    "log_uniform": Between,
    "log_uniform_values": Between,
    "q_log_uniform": SteppedBetween,
    "q_log_uniform_values": SteppedBetween,
    "inv_log_uniform": Between,
    "inv_log_uniform_values": Between,
    "normal": Gaussian,
    "q_normal": SteppedGaussian,
    "log_normal": Gaussian,
    "q_log_normal": SteppedGaussian,
}
"""Options of W&B's distributions of numbers."""
EXPONENTS = ("log_uniform", "q_log_uniform", "inv_log_uniform")
"""Distributions whose limits are natural logarithms."""


@dataclass(frozen=True)
class Parameter:
    """A key of the config that a sweep varies."""

    name: str
    kind: str
    """W&B's name of the distribution."""
    values: tuple[Any, ...] = ()
    """Values of a list; empty for numbers."""
    probabilities: tuple[Number, ...] = ()
    low: Number = 0.0
    high: Number = 1.0
    """Bounds of the numbers to draw: of values, or of quantiles for weights and normal distributions."""
    mu: Number = 0.0
    sigma: Number = 1.0
    step: Number | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that the sampler chooses from; empty if it draws a number."""
        return tuple(map(str, self.values)) if self.kind == "categorical" else ()

    @property
    def is_log(self) -> bool:
        """True if equal ratios of values are equally likely."""
        return "log" in self.kind

    @property
    def draws_log(self) -> bool:
        """True if the sampler draws the logarithm uniformly."""
        return self.is_log and "uniform" in self.kind

    def listed(self) -> list[str]:
        """Return the values as texts; empty for a continuous parameter."""
        if self.kind == "int_uniform":
            return [str(value) for value in self.grid()]
        return [str(value) for value in self.values]

    def value(self, drawn: Drawn) -> Any:
        """Return the value of the key for a draw."""
        if self.kind == "categorical":
            return self.values[self.labels.index(str(drawn))]
        place = float(drawn)
        if self.kind == "categorical_w_probabilities":
            ends = list(accumulate(self.probabilities))
            likely = [i for i, share in enumerate(self.probabilities) if share > 0]
            return self.values[next((i for i in likely if place * ends[-1] < ends[i]), likely[-1])]
        if self.kind == "int_uniform":
            return int(drawn)
        if "normal" in self.kind:
            place = self.mu + self.sigma * NormalDist().inv_cdf(place)
            place = math.exp(place) if self.is_log else place
        return rounded(place, self.step)

    def grid(self) -> list[Drawn]:
        """Return the draws of all values.

        Raises:
            ConfigError: they cannot be listed.
        """
        if self.kind == "categorical":
            return list(self.labels)
        if self.kind == "int_uniform":
            return list(range(int(self.low), int(self.high) + 1))
        require(
            self.kind != "categorical_w_probabilities",
            f"parameters.{self.name}: method grid tries every value once, so probabilities have no effect; "
            "leave them out, or use method random",
        )
        if self.kind != "q_uniform" or self.step is None:
            raise ConfigError(
                f"parameters.{self.name}: method grid needs a list of values, and {self.kind} is continuous; "
                "give values, int_uniform or q_uniform, or use method random"
            )
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        require(
            first <= last,
            f"parameters.{self.name}: no multiple of q={self.step} lies between min={self.low} and "
            f"max={self.high}; give a smaller q, or values",
        )
        return [rounded(n * self.step, self.step) for n in range(first, last + 1)]

    def corners(self) -> list[Drawn]:
        """Return the draws at both ends of a range, or one draw of each listed value."""
        if self.kind == "categorical":
            return list(self.labels)
        if self.kind == "categorical_w_probabilities":
            ends, shares = list(accumulate(self.probabilities)), self.probabilities
            return [
                (end - share / 2) / ends[-1] for end, share in zip(ends, shares, strict=True) if share > 0
            ]
        return list(dict.fromkeys((self.low, self.high)))


def rounded(value: Number, step: Number | None) -> Number:
    """Return the nearest multiple of a step; an integer if the step is one."""
    if step is None:
        return value
    nearest = round(value / step) * step
    return nearest if isinstance(step, int) else float(f"{nearest:.12g}")


def combinations(parameters: Sequence[Parameter], method: str) -> Iterator[dict[str, Drawn]]:
    """Yield all draws of a grid, the first parameter varying slowest; otherwise the corners of the space."""
    names = [parameter.name for parameter in parameters]
    sides = [each.grid() if method == "grid" else each.corners() for each in parameters]
    if method == "grid" or math.prod(map(len, sides)) <= MAX_CORNERS:
        yield from (dict(zip(names, drawn, strict=True)) for drawn in product(*sides))
        return
    first = {name: side[0] for name, side in zip(names, sides, strict=True)}
    yield first
    yield from (first | {name: drawn} for name, side in zip(names, sides, strict=True) for drawn in side[1:])


def parse_parameters(node: Any, prefix: str = "") -> tuple[list[Parameter], dict[str, Any]]:
    """Return what a sweep varies, in the order of the file, and its constants; dots join nested names.

    Raises:
        ConfigError: a parameter cannot be understood.
    """
    if not isinstance(node, Mapping) or not node:
        where = f"parameters.{prefix}".rstrip(".")
        raise ConfigError(f"{where} must name what to vary, got {node!r}; give key: {{values: [...]}}")
    varied: list[Parameter] = []
    constants: dict[str, Any] = {}
    for key, options in node.items():
        name, inner, fixed = f"{prefix}{key}", list[Parameter](), dict[str, Any]()
        if isinstance(options, Mapping) and "parameters" in options:
            inner, fixed = parse_parameters(options["parameters"], f"{name}.")
        elif isinstance(options, Mapping) and "value" in options:
            _check_options(name, options, ("value",))
            fixed[name] = _not_null(name, options["value"])
        else:
            inner.append(_parameter(name, options))
        known = {parameter.name for parameter in varied} | constants.keys()
        if twice := known & ({parameter.name for parameter in inner} | fixed.keys()):
            raise ConfigError(f"parameters.{min(twice)} stands twice, with dots and nested; leave one out")
        varied += inner
        constants |= fixed
    return varied, constants


def _parameter(name: str, options: Any) -> Parameter:
    kind = options.get("distribution", _implied_kind(options)) if isinstance(options, Mapping) else None
    if kind is None:
        is_nested = isinstance(options, Mapping) and options
        if is_nested and all(isinstance(each, Mapping) for each in options.values()):
            inner = next(iter(options))
            raise ConfigError(
                f"parameters.{name}: nested keys stand below `parameters`; give {name}: {{parameters: "
                f"{{{inner}: ...}}}}, or {name}.{inner}: ..."
            )
        raise ConfigError(
            f"parameters.{name} must say what to try, got {options!r}; give value, values, min and max, or a "
            "distribution"
        )
    if kind in LISTED:
        return _choice(name, kind, options)
    if kind not in NUMERIC:
        close = get_close_matches(str(kind), [*LISTED, *NUMERIC], n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join([*LISTED, *NUMERIC])}"
        raise ConfigError(f"parameters.{name}: unknown distribution {kind!r}; {hint}")
    given = {key: value for key, value in options.items() if key != "distribution"}
    return _number(name, kind, convert(NUMERIC[kind], given, f"parameters.{name}"))


def _implied_kind(options: Mapping[str, Any]) -> str | None:
    """Return the distribution that W&B takes if none is named."""
    if "values" in options:
        return "categorical_w_probabilities" if "probabilities" in options else "categorical"
    if {"min", "max"} <= options.keys():
        return "int_uniform" if all(is_whole(options[key]) for key in ("min", "max")) else "uniform"
    return None


def _choice(name: str, kind: str, options: Mapping[str, Any]) -> Parameter:
    is_weighted = kind == "categorical_w_probabilities"
    _check_options(name, options, ("values", "probabilities") if is_weighted else ("values",))
    values, shares = options["values"], options.get("probabilities", [])
    if not isinstance(values, list) or not values:
        raise ConfigError(f"parameters.{name}: values must be a list of values to try, got {values!r}")
    texts = [str(_not_null(name, value)) for value in values]
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ConfigError(f"parameters.{name}: values list {twice[0]} twice; leave one out")
    are_shares = isinstance(shares, list) and all(is_finite(share) and share >= 0 for share in shares)
    if is_weighted and (not are_shares or len(shares) != len(values) or sum(shares) <= 0):
        raise ConfigError(
            f"parameters.{name}: probabilities must be a number of at least 0 for each of {len(values)} "
            f"values, got {shares}"
        )
    return Parameter(name, kind, tuple(values), tuple(shares))


def _number(name: str, kind: str, given: Any) -> Parameter:
    step = getattr(given, "q", None)
    if isinstance(given, Gaussian):
        return Parameter(name, kind, low=TAIL, high=1 - TAIL, mu=given.mu, sigma=given.sigma, step=step)
    low, high = given.min, given.max
    require(low < high, f"parameters.{name}.min must be below max={high}, got {low}; give a range")
    if kind in EXPONENTS:
        low, high = (-high, -low) if kind == "inv_log_uniform" else (low, high)
        low, high = math.exp(low), math.exp(high)
    require(
        low > 0 or "log" not in kind, f"parameters.{name}.min must be above 0, got {low}; {kind} takes logs"
    )
    is_int = kind == "int_uniform"
    return Parameter(
        name, kind, low=low if is_int else float(low), high=high if is_int else float(high), step=step
    )


def _not_null(name: str, value: Any) -> Any:
    """Return a value; W&B writes it on a command line, which has no null."""
    require(value is not None, f"parameters.{name}: null reaches the command as the text None; write 'null'")
    return value


def _check_options(name: str, options: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    """Raise ConfigError if an option is missing, or is one that the distribution does not take."""
    missing = [key for key in needed if key not in options]
    odd = [str(key) for key in options if key not in (*needed, "distribution")]
    if missing or odd:
        which = f"missing {missing[0]}" if missing else f"unexpected {odd[0]}"
        raise ConfigError(f"parameters.{name}: {which}; it takes {', '.join(needed)}")
