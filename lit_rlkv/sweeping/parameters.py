"""What a sweep varies: the distributions of W&B's sweep files, as an optimiser draws from them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from lit_rlkv.config import ConfigError

TAIL = 1e-6
"""Share of a distribution without bounds that is cut off on either side."""


@dataclass(frozen=True)
class Bounds:
    """A number that the optimiser draws."""

    low: float | int
    high: float | int
    is_log: bool = False
    is_whole: bool = False


Drawn = float | int | str
"""What an optimiser draws: a number within bounds, or the label of a choice."""


@dataclass(frozen=True)
class Parameter(ABC):
    """One key of the config that a sweep varies."""

    name: str

    @property
    @abstractmethod
    def space(self) -> Bounds | tuple[str, ...]:
        """What the optimiser draws from: bounds of a number, or labels."""

    @abstractmethod
    def value(self, drawn: Drawn) -> Any:
        """The value of the key that a draw stands for."""

    @property
    def is_log(self) -> bool:
        """Whether equal ratios are equally likely, which a picture should show."""
        return False

    def grid(self) -> list[Drawn]:
        """The draws of all values.

        Raises:
            ConfigError: they cannot be listed.
        """
        raise ConfigError(
            f"parameters.{self.name}: method grid needs a list of values, and this one is continuous; give "
            "values, int_uniform or q_uniform, or use method random"
        )

    def corners(self) -> list[Drawn]:
        """Draws at the ends of the range; of a choice, every one."""
        assert isinstance(self.space, Bounds)
        return list(dict.fromkeys((self.space.low, self.space.high)))


@dataclass(frozen=True)
class Choice(Parameter):
    """Any of the values listed, equally likely."""

    values: tuple[Any, ...]

    @property
    def space(self) -> tuple[str, ...]:
        return tuple(str(value) for value in self.values)

    def value(self, drawn: Drawn) -> Any:
        return self.values[self.space.index(str(drawn))]

    def grid(self) -> list[Drawn]:
        return list(self.space)

    def corners(self) -> list[Drawn]:
        return self.grid()


@dataclass(frozen=True)
class WeightedChoice(Parameter):
    """Any of the values listed, with their probabilities; the optimiser draws a quantile."""

    values: tuple[Any, ...]
    probabilities: tuple[float | int, ...]

    @property
    def space(self) -> Bounds:
        return Bounds(0.0, 1.0)

    def value(self, drawn: Drawn) -> Any:
        ends = list(accumulate(self.probabilities))
        place = float(drawn) * ends[-1]
        likely = [i for i, share in enumerate(self.probabilities) if share > 0]
        return self.values[next((i for i in likely if place < ends[i]), likely[-1])]

    def grid(self) -> list[Drawn]:
        raise ConfigError(
            f"parameters.{self.name}: method grid tries every value once, so probabilities have no meaning; "
            "leave them out, or use method random"
        )

    def corners(self) -> list[Drawn]:
        """The middle of each value's share."""
        ends = list(accumulate(self.probabilities))
        return [
            (end - share / 2) / ends[-1]
            for end, share in zip(ends, self.probabilities, strict=True)
            if share > 0
        ]


@dataclass(frozen=True)
class Whole(Parameter):
    """Any whole number from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def space(self) -> Bounds:
        return Bounds(self.low, self.high, is_whole=True)

    def value(self, drawn: Drawn) -> int:
        return int(drawn)

    def grid(self) -> list[Drawn]:
        return list(range(self.low, self.high + 1))


@dataclass(frozen=True)
class Interval(Parameter):
    """A number between `low` and `high`, uniform or log-uniform, perhaps rounded to multiples of `step`."""

    low: float | int
    high: float | int
    log: bool = False
    step: float | int | None = None

    @property
    def space(self) -> Bounds:
        return Bounds(float(self.low), float(self.high), is_log=self.log)

    @property
    def is_log(self) -> bool:
        return self.log

    def value(self, drawn: Drawn) -> float | int:
        return rounded(float(drawn), self.step)

    def grid(self) -> list[Drawn]:
        if self.step is None or self.log:
            return super().grid()
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        if last < first:
            raise ConfigError(
                f"parameters.{self.name}: no multiple of q={self.step} lies between min={self.low} and "
                f"max={self.high}; give a smaller q, or values"
            )
        return [rounded(n * self.step, self.step) for n in range(first, last + 1)]


@dataclass(frozen=True)
class Normal(Parameter):
    """A number, or its logarithm, that is normally distributed; the optimiser draws a quantile."""

    mu: float | int = 0.0
    sigma: float | int = 1.0
    log: bool = False
    step: float | int | None = None

    @property
    def space(self) -> Bounds:
        return Bounds(TAIL, 1 - TAIL)

    @property
    def is_log(self) -> bool:
        return self.log

    def value(self, drawn: Drawn) -> float | int:
        place = self.mu + self.sigma * NormalDist().inv_cdf(float(drawn))
        return rounded(math.exp(place) if self.log else place, self.step)


def rounded(value: float | int, step: float | int | None) -> float | int:
    """The nearest multiple of a step; whole where the step is, and without the last digits' float error."""
    if step is None:
        return value
    nearest = round(value / step) * step
    return nearest if isinstance(step, int) else float(f"{nearest:.12g}")


def listed(parameter: Parameter) -> list[str]:
    """The values of a parameter that has a list of them; empty for a continuous one."""
    if isinstance(parameter, Choice | WeightedChoice):
        return [str(value) for value in parameter.values]
    return [str(value) for value in parameter.grid()] if isinstance(parameter, Whole) else []
