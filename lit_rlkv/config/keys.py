"""Refuse keys that do not exist, and say which one may be meant."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import cast

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.config.composing import CONF_DIR, SEARCH_PATH, groups, initialized, options_of
from lit_rlkv.config.errors import ConfigError, require
from lit_rlkv.config.options import leaves
from lit_rlkv.settings import show

PRESETS = ("experiment", "recipe", "debug")
"""Groups that set keys of others and have none of their own."""
OPTIONS, NAMED = "cache.policy_options.", ("reward.functions.", "user_callbacks.")
"""Places whose keys the user chooses: arguments, and names of nodes with a `_target_`."""
FOREIGN_NAMES, TABLES = Path(__file__).with_name("foreign_names.yaml"), ("trl", "verl", "others")
READ_WITH = {
    "environment": "rollout max_turns max_observation_tokens environment_timeout_s environment_workers",
    "cache.policy": "algorithm.eviction weight lr_scale clip kl_coef",
    "cache.target_overlap": "cache budget_bounds",
    "algorithm.kl.target": "algorithm.kl horizon",
    "algorithm.reference_sync.every": "algorithm.reference_sync alpha",
    "algorithm.curriculum.decay": "algorithm.curriculum floor",
    "reward.overlong_buffer": "reward overlong_penalty",
    "callbacks.keep_best": "callbacks best_metric best_mode",
}
"""Node and names of keys that are read only with another key."""
ALL_KEYS = "docs/reference/config.md has all keys"
ALIKE, ALIKE_ELSEWHERE = 0.75, 0.8
"""Least similarity of two names, of which one may be the other misspelt; in another group it is more."""


def check_keys(cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str] = ()) -> None:
    """Refuse keys of the command line or of a preset that no config group declares.

    Args:
        choices: the option chosen in each group, as Hydra's runtime reports them.
        overrides: of the command line; what it adds with `+` is meant where a signature judges it.

    Raises:
        ConfigError: naming the key and the closest one that exists.
    """
    for name in PRESETS:  # Hydra does not merge ??? over a default
        preset = CONF_DIR / name / f"{choices.get(name)}.yaml"
        for key in OmegaConf.missing_keys(OmegaConf.load(preset)) if preset.is_file() else ():
            is_given = OmegaConf.select(cfg, key) is not None
            require(is_given, f"{name}={preset.stem} needs {key}, which is not given; add {key}=...")
    for key in (override[1:].partition("=")[0] for override in overrides if override[:1] == "~"):
        is_optional = key in PRESETS or key.startswith("diagnostics.") or _is_judged(cfg, key)
        require(
            is_optional and not key.endswith("_target_"),
            f"~{key} takes away what every run reads; give {key}=... another value, or none",
        )
    chosen = {name: "none" if name in PRESETS else choice for name, choice in choices.items()}
    folders = [override for override in overrides if override.startswith(SEARCH_PATH)][-1:]
    known = _declared((*folders, *(f"{name}={option}" for name, option in chosen.items() if "/" not in name)))
    added = [override.lstrip("+").partition("=")[0] for override in overrides if override[0] == "+"]
    for path, value in leaves(OmegaConf.to_container(cfg)):
        is_added = any(f"{path}.".startswith(f"{key}.") for key in added)
        is_free = path.startswith(OPTIONS) or (path.startswith(NAMED) and _has_target(cfg, path))
        if path in known or is_free or (is_added and _is_judged(cfg, path)):
            continue
        below = ", ".join(sorted(key for key in known if key.startswith(f"{path}.") and "._" not in key))
        if below and path.startswith("diagnostics.") and value is None:
            continue  # it is left out
        require(not below, f"{path}={show(value)} takes the place of {below}; set one of these")
        added_by = f"if the class that _target_ names takes it, add it by +{path}=..."
        otherwise = added_by if _has_target(cfg, path) else ALL_KEYS
        raise ConfigError(f"unknown key {path!r}: {suggestion(path, known, value, otherwise)}")


def check_effects(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise a ConfigError for a key of the command line that nothing reads, with the key that it needs."""
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    for other, keys in READ_WITH.items():
        value = OmegaConf.select(cfg, other)
        is_on = value is not None and (other, value) != ("callbacks.keep_best", 0)
        if other == "cache.policy":  # of the user's own, it may be trained
            is_on = value == "learned" or "." in str(value)
        above, *names = keys.split()
        for key in given.intersection(f"{above}.{name}" for name in names):
            found = OmegaConf.select(cfg, key)
            require(
                is_on or not found,
                f"{key}={show(found)} has no effect with {other}={show(value)}; change that, or leave it out",
            )


def suggestion(key: str, known: Collection[str], value: object = None, otherwise: str = ALL_KEYS) -> str:
    """Return the key that an unknown one may mean: of the same meaning, or spelt most like it."""
    elsewhere = keys_of_options()
    if key in elsewhere:
        return f"{elsewhere[key]} has it"
    if names := same_meaning(key, value):
        return f"here it is {', '.join(names)}"
    by_name: dict[str, list[str]] = {}
    for one in sorted({*known, *elsewhere, *(each.rpartition(".")[0] for each in known)}):
        by_name.setdefault(one.rpartition(".")[2], []).append(one)
    group, _, name = key.rpartition(".")
    own = [one.rpartition(".")[2] for ones in by_name.values() for one in ones if _group(one) == group]
    alike = get_close_matches(name, own, 1, ALIKE)
    if not alike and (group == "cache" or get_close_matches(group, [OPTIONS[:-1]], 1, ALIKE_ELSEWHERE)):
        return f"did you mean '{OPTIONS}{name}', if the policy takes it?"
    alike = alike or get_close_matches(name, by_name, 1, ALIKE_ELSEWHERE)
    closest = [get_close_matches(key, by_name[one], 1, 0.0)[0] for one in alike]
    return f"did you mean {closest[0]!r}?" if closest else otherwise


def _group(key: str) -> str:
    return key.rpartition(".")[0]


def same_meaning(key: str, value: object = None) -> list[str]:
    """Return the keys that do what a key of another package does, found by as many last names as it has.

    A row that names the value too wins.
    """
    named = [(one, ours) for table in TABLES for theirs, ours, _ in foreign_rows(table) for one in theirs]
    if exact := [ours for one, ours in named if one == f'{key.rpartition(".")[2]}="{value}"']:
        return exact[0]
    rows = [(f".{one.partition('=')[0]}", ours) for one, ours in named]
    parts = key.split(".")
    for start in range(len(parts)):
        end = "." + ".".join(parts[start:])
        keys = [each for name, ours in rows if name.endswith(end) for each in ours]
        if keys:
            return list(dict.fromkeys(keys))
    return []


def foreign_rows(table: str) -> Iterator[tuple[list[str], list[str], str]]:
    """Yield names, keys and note of each row of a table in foreign_names.yaml: trl, verl or others."""
    for theirs, ours, *note in cast(DictConfig, OmegaConf.load(FOREIGN_NAMES))[table]:
        yield theirs.split(", "), ours.split(", ") if ours else [], note[0] if note else ""


@lru_cache
def keys_of_options() -> dict[str, str]:
    """Return the keys of all options, each with the last option that has it."""
    found: dict[str, str] = {}
    for group in (name for name in groups() if name not in PRESETS):
        for option in options_of(group):
            node = OmegaConf.to_container(OmegaConf.load(CONF_DIR / group / f"{option}.yaml"))
            found |= {key: f"{group}={option}" for key, _ in leaves(node, group)}
    return found


@lru_cache
def _declared(overrides: tuple[str, ...]) -> frozenset[str]:
    """Return the keys that options of groups declare; each run of a sweep asks."""
    with initialized():
        declared = compose("config", overrides=list(overrides))
    return frozenset(key for key, _ in leaves(OmegaConf.to_container(declared)))


def _is_judged(cfg: DictConfig, path: str) -> bool:
    """True if the schema leaves the keys at this place to a constructor, which checks them."""
    return path.startswith((OPTIONS, *NAMED)) or _has_target(cfg, path)


def _has_target(cfg: DictConfig, path: str) -> bool:
    names = path.split(".")
    above = (OmegaConf.select(cfg, ".".join(names[:n])) for n in range(1, len(names) + 1))
    return any(isinstance(node, DictConfig) and "_target_" in node for node in above)
