"""What a sweep compares its runs by, and whether a run logs it at all."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lit_rlkv.callbacks.final import FINAL_METRICS
from lit_rlkv.checks import is_number
from lit_rlkv.config import ConfigError

DICTIONARY = Path(__file__).parents[2] / "METRICS.md"
"""All names that runs log; it stands beside the package in a clone, and is not part of a wheel."""


@dataclass(frozen=True)
class Metric:
    """A name, and whether more of it is better."""

    name: str = "eval/accuracy"
    goal: str = "maximize"
    target: float | int | None = None
    """No new run is started once one is as good as this."""

    @property
    def is_final(self) -> bool:
        """Whether it is known only when a run has ended."""
        return self.name in FINAL_METRICS

    def cost(self, value: float | int) -> float | int:
        """The value with the sign with which lower is better."""
        return -value if self.goal == "maximize" else value

    def is_reached(self, value: float | int) -> bool:
        return self.target is not None and self.cost(value) <= self.cost(self.target)


def parse_metric(node: Any) -> Metric:
    """The `metric` of a sweep file; without one, the accuracy under the run's own budget.

    Raises:
        ConfigError: it names none, or has options that a metric does not take.
    """
    if node is None:
        return Metric()
    if not isinstance(node, Mapping) or not isinstance(node.get("name"), str):
        raise ConfigError(
            f"metric={node!r} has no name; give metric: {{name: eval/accuracy, goal: maximize}}"
        )
    odd = [str(key) for key in node if key not in ("name", "goal", "target")]
    if odd:
        raise ConfigError(f"metric: unexpected {odd[0]!r}; it takes name, goal, target")
    goal, target = node.get("goal", "minimize"), node.get("target")
    if goal not in ("minimize", "maximize"):
        raise ConfigError(f"metric.goal={goal!r} is unknown; choose minimize or maximize")
    if target is not None and not is_number(target):
        raise ConfigError(f"metric.target={target!r} is no number; give one, or leave it out")
    return Metric(node["name"], goal, target)


def check_metric(metric: Metric, cfg: DictConfig, *, is_watched: bool) -> None:
    """Refuse a metric that a run of this config would never log, as far as that is known.

    Args:
        is_watched: by early stopping, while the run trains.

    Raises:
        ConfigError: naming the metric and what to do.
    """
    stages = list(cfg.stages)
    if metric.is_final:
        if is_watched:
            raise ConfigError(
                f"metric={metric.name} is known only at a run's end, too late for early_terminate; use one "
                "of every iteration, such as reward, or leave early_terminate out"
            )
        needed = ["rl", "eval"] if metric.name.endswith("_gain") else ["eval"]
        if not set(needed) <= set(stages):
            raise ConfigError(
                f"metric={metric.name} needs {' and '.join(needed)} in stages={stages}; add them"
            )
        return
    if "rl" not in stages:
        raise ConfigError(f"metric={metric.name} is logged by rl, which is not in stages={stages}; add it")
    names = logged_names()
    if names and not any(name.fullmatch(metric.name) for name in names.values()):
        close = get_close_matches(metric.name, [*FINAL_METRICS, *names], n=1)
        hint = f"did you mean {close[0]!r}?" if close else "METRICS.md lists them"
        raise ConfigError(f"metric={metric.name!r} is logged by no run; {hint}")


def logged_names() -> dict[str, re.Pattern[str]]:
    """Every name in the metric dictionary and what it matches, `{x}` being any name; empty without it."""
    if not DICTIONARY.is_file():
        return {}
    rows = [line.split("|")[1] for line in DICTIONARY.read_text().splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return {name: re.compile(re.sub(r"\\{.+?\\}", "[^/]+", re.escape(name))) for name in names}
