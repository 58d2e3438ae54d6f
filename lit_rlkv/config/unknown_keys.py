"""Refuse keys that do not exist, which Hydra would merge from a preset without a word."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.config.composing import CONF_DIR, initialized
from lit_rlkv.config.errors import ConfigError
from lit_rlkv.config.hints import hint, translated
from lit_rlkv.config.options import leaves

PRESETS = ("experiment", "recipe", "debug")
"""Groups that set keys of others and have none of their own."""
FREE = ("cache.policy_options.", "reward.functions.", "user_callbacks.")
"""Nodes whose names the user chooses."""


def check_keys(cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str] = ()) -> None:
    """Refuse keys that no config group declares: Hydra merges a misspelt key of an experiment file silently.

    Args:
        choices: the option chosen in each group, as Hydra's runtime reports them.
        overrides: of the command line; what it adds with `+` is meant where a signature judges it.

    Raises:
        ConfigError: naming the key and the closest one that exists.
    """
    _check_given(cfg, choices)
    groups = [f"{name}={choice}" for name, choice in choices.items() if not name.startswith("hydra/")]
    plain = (choice for choice in groups if choice.split("=")[0] not in PRESETS)
    _check_deleted(cfg, [override[1:].partition("=")[0] for override in overrides if override[:1] == "~"])
    declared, diagnostics = _declared((*plain, *(f"{name}=none" for name in PRESETS)))
    # A diagnostic that is left out has no keys.
    known = declared | {f"diagnostics.{name}" for name in diagnostics if cfg.diagnostics.get(name, 0) is None}
    added = [override for override in overrides if override.startswith("+")]
    for path, _ in leaves(OmegaConf.to_container(cfg)):
        if path not in known and not (_is_set_by(path, added) and _is_judged(cfg, path)):
            raise ConfigError(_unknown(path, cfg, known, _is_set_by(path, overrides)))


@lru_cache
def _declared(groups: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys that options of groups declare, and the diagnostics; each run of a sweep asks."""
    with initialized():
        declared = compose("config", overrides=list(groups))
    keys = frozenset(key for key, _ in leaves(OmegaConf.to_container(declared)))
    return keys, frozenset(map(str, declared.diagnostics))


def _check_given(cfg: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Refuse null where the chosen preset says `???`, which Hydra does not merge over a default."""
    for name in PRESETS:
        option = choices.get(name)
        preset = CONF_DIR / name / f"{option}.yaml"
        for key in OmegaConf.missing_keys(OmegaConf.load(preset)) if preset.is_file() else ():
            if OmegaConf.select(cfg, key) is None:
                raise ConfigError(f"{name}={option} needs {key}, which is not given; add {key}=...")


def _check_deleted(cfg: DictConfig, keys: Sequence[str]) -> None:
    """Refuse to leave out, by `~`, what a run reads; what a constructor takes it judges itself."""
    for key in keys:
        is_option = key in PRESETS or key.startswith("diagnostics.")
        if not is_option and (key.endswith("_target_") or not _is_judged(cfg, key)):
            off = f"{key}=none" if (CONF_DIR / key / "none.yaml").is_file() else f"{key}=..."
            raise ConfigError(f"~{key} takes away what every run reads; write {off}")


def _is_judged(cfg: DictConfig, path: str) -> bool:
    """True if the schema leaves the keys at this place to a constructor, which checks them."""
    names = path.split(".")
    above = [OmegaConf.select(cfg, ".".join(names[:n])) for n in range(1, len(names) + 1)]
    has_target = any(isinstance(node, DictConfig) and "_target_" in node for node in above)
    return has_target or path.startswith(FREE)


def _is_set_by(path: str, overrides: Sequence[str]) -> bool:
    keys = [override.lstrip("+").split("=")[0] for override in overrides]
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _unknown(path: str, cfg: DictConfig, known: frozenset[str], is_typed: bool) -> str:
    """Return the error for a key that no group declares, or that replaces a node of several keys."""
    below = [key.removeprefix(f"{path}.") for key in known if key.startswith(f"{path}.")]
    inner = [key for key in below if not key.startswith("_")]
    if inner:
        off = "; null leaves it out" if path.startswith("diagnostics.") else ""
        if (meant := translated(path, known)) is not None:
            off = f", such as {meant}={OmegaConf.select(cfg, path)}"
        return (
            f"{path}={OmegaConf.select(cfg, path)} takes the place of {', '.join(sorted(inner))}; "
            f"set these one by one{off}"
        )
    places = {key for leaf in known for key in (leaf, leaf.rpartition(".")[0])}
    said = hint(path, places) or "--help-all lists all keys"
    where = "on the command line" if is_typed else "in the preset of experiment, recipe or debug"
    return f"unknown key {path!r} {where}: {said}"
