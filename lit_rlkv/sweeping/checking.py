"""Everything that can be wrong with a sweep, said before its first run."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir

from lit_rlkv.config import CONF_DIR, Config, ConfigError, check_keys, parse_config
from lit_rlkv.reporting.progress import track
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.sweeping.grid import combinations
from lit_rlkv.sweeping.metric import check_metric
from lit_rlkv.sweeping.plan import Plan

N_QUIET = 20
"""Combinations up to which a check is too quick to show."""


def check_plan(plan: Plan) -> Config:
    """Compose and check every combination of a grid, or the corners of a space; returns the first config.

    Raises:
        ConfigError: naming the combination that does not work.
    """
    cells = cells_to_check(plan)
    configs: list[Config] = []
    known: set[str] = set()
    with track("check", len(cells)) if len(cells) > N_QUIET else nullcontext(int) as advance:
        for values in cells:
            with _naming_the_run(values):
                configs.append(_checked(plan, values, known))
            advance()
    return configs[0]


def first_config(plan: Plan) -> Config:
    """The config of the first combination, which is not checked.

    Raises:
        ConfigError: it does not compose.
    """
    values = plan.values(next(combinations(plan.sweep)))
    with _naming_the_run(values):
        return parse_config(plan.compose(values, Path("unused")).cfg)


@contextmanager
def _naming_the_run(values: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        told = " ".join(f"{name}={value}" for name, value in values.items())
        raise ConfigError(f"{error} (in the run with {told})") from error


def cells_to_check(plan: Plan) -> list[dict[str, Any]]:
    """All combinations, but of the seed, which no rule compares with anything, each value once."""
    cells = [plan.values(drawn) for drawn in combinations(plan.sweep)]
    first = cells[0]
    others = {name: value for name, value in first.items() if name != "seed"}
    return [
        cell
        for cell in cells
        if cell.get("seed") == first.get("seed") or all(cell[name] == value for name, value in others.items())
    ]


def _checked(plan: Plan, values: dict[str, Any], known: set[str]) -> Config:
    """The config of a run that satisfies every rule; groups whose keys were checked before are `known`."""
    composed = plan.compose(values, Path("unused"))
    groups = repr(composed.choices)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        if groups not in known:
            check_keys(composed.cfg, composed.choices, composed.overrides)
    known.add(groups)
    cfg = checked_config(composed.cfg)
    check_metric(plan.sweep.metric, cfg, is_watched=plan.sweep.hyperband is not None)
    return cfg
