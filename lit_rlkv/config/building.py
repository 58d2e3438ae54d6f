"""From YAML to objects: trusted targets and checked signatures."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_rlkv.checks import is_number, is_whole
from lit_rlkv.config.naming import closest
from lit_rlkv.trust import KEY, can_be_trusted, is_trusted, trust_modules, trusted_modules

PACKAGE_DIR = Path(__file__).parent.parent
SHIPPED, CLONED = PACKAGE_DIR / "conf", PACKAGE_DIR.parent / "conf"
CONF_DIR = SHIPPED if SHIPPED.is_dir() else CLONED
"""The configs of the wheel, or those of the clone in an editable install."""

TRUSTED = ("lit_rlkv.", "torch.optim.", "lightning.pytorch.loggers.")
HOMES = (
    "lit_rlkv.callbacks.",
    "lit_rlkv.reporting.loggers.",
    "lit_rlkv.experience.advantages.",
    "lit_rlkv.tasks.",
    "lit_rlkv.models.presets.",
    "lit_rlkv.modules.",
    "lit_rlkv.objectives.",
    "lit_rlkv.rewards.functions.",
    "lit_rlkv.rewards.judges.",
    *TRUSTED[1:],
)
"""Where what a config may name is defined: the rest of the package can write files, or run them."""


class ConfigError(ValueError):
    """A mistake in the configuration: what was given, why it is wrong, what to do."""


def require(is_right: bool, message: str) -> None:
    """Raise the message as a ConfigError unless something holds."""
    if not is_right:
        raise ConfigError(message)


@contextmanager
def as_config_errors(where: str) -> Iterator[None]:
    """Raise the errors of a constructor or loader as ConfigError, prefixed by the key `where`."""
    try:
        yield
    except ConfigError:
        raise
    except InstantiationException as error:
        raise ConfigError(f"{where}: {error.__cause__ or error}") from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(f"{where}: {error}") from error


def build(node: DictConfig) -> Any:
    """The object (or, under `_partial_`, the function) that a node with `_target_` describes.

    Raises:
        ConfigError: a target outside the trusted packages, or arguments that it does not take.
    """
    check_targets(node)
    with as_config_errors(node._target_):
        return instantiate(node)


def check_targets(node: Any, path: str = "") -> None:
    """Check every `_target_` below a node against the trusted packages and its signature; build nothing."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    _check_trust(node, path)
    for where, target, arguments in _targets(node, path):
        try:
            found = get_object(target)
        except Exception as error:
            raise ConfigError(f"{where}._target_={target!r} cannot be imported: {error}") from error
        # A trusted module also holds what it imports, torch.load among it; only what it defines is meant.
        home = f"{getattr(found, '__module__', None)}."
        is_named = home.startswith(HOMES) or is_trusted(home)
        if not (inspect.isclass(found) or inspect.isfunction(found)) or not is_named:
            raise ConfigError(
                f"{where}._target_={target!r} is no class or function that a config may name; choose one of "
                "those in conf/"
            )
        takes, takes_any = _arguments_of(found)
        for name, value in arguments.items():
            if name not in takes and not takes_any:
                raise ConfigError(f"{target}: unexpected {name!r}; it takes {', '.join(takes)}")
            if name in takes:
                _check_kind(f"{where}.{name}".lstrip("."), value, takes[name].annotation)


def grant_trust(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Take `trusted_modules` out of a config and trust the modules, if the command line itself sets the key.

    Raises:
        ConfigError: the key comes from a config file, or names a module that cannot be trusted.
    """
    with read_write(cfg), open_dict(cfg):
        names = cfg.pop(KEY, None)
    is_given = any(override.lstrip("+").partition("=")[0] == KEY for override in overrides)
    require(
        names is None or OmegaConf.is_list(names),
        f"{KEY}={names} is not a list; write {KEY}=[{names}]",
    )
    require(
        is_given or not names,
        f"{KEY}={names} is set in a config file, which cannot grant trust; give it on the command line",
    )
    with as_config_errors(KEY):
        trust_modules(list(names or ()))


def _check_trust(node: Any, path: str) -> None:
    """Refuse targets outside of the trusted packages, and say how the user can trust their own modules."""
    named = {f"{where}._target_": str(target) for where, target, _ in _targets(node, path)}
    cache = node.get("cache") if isinstance(node, Mapping) else None
    policy = cache.get("policy") if isinstance(cache, Mapping) else None
    if isinstance(policy, str) and "." in policy:
        named["cache.policy"] = policy
    refused = {
        where: target
        for where, target in named.items()
        if not is_trusted(target) and (where == "cache.policy" or not target.startswith(TRUSTED))
    }
    for where, target in refused.items():
        if not can_be_trusted(target):
            raise ConfigError(
                f"{where}={target!r} is not from a trusted package ({', '.join(TRUSTED)}); "
                "a config must not name code of its own"
            )
    if refused:
        modules = ",".join(sorted({target.partition(".")[0] for target in refused.values()}))
        given = ", ".join(f"{where}={target!r}" for where, target in refused.items())
        trusted = ", ".join((*TRUSTED, *trusted_modules()))
        raise ConfigError(
            f"{given} is not from a trusted package ({trusted}); if you trust the code of {modules}, add "
            f"{KEY}=[{modules}] to the command line"
        )


def _check_kind(name: str, value: Any, annotation: Any) -> None:
    """Check that a value has the type of the argument that receives it."""
    if annotation is bool and not isinstance(value, bool):
        raise ConfigError(f"{name}={value} is neither true nor false; give one of them")
    if annotation is int and not is_whole(value):
        raise ConfigError(f"{name}={value} is no whole number; give one")
    if annotation in (float, float | int) and not is_number(value):
        raise ConfigError(f"{name}={value} is no number; give one")


def _arguments_of(target: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters of a class or function, and if it takes others too.

    A class that hands `**options` on to its base takes what the base takes.
    """
    bases = inspect.getmro(target) if inspect.isclass(target) else ()
    functions = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)] or [target]
    takes: dict[str, inspect.Parameter] = {}
    for function in functions:
        parameters = list(inspect.signature(function).parameters.values())
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        takes = named | takes
        takes.pop("self", None)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return takes, False
    return takes, True


def _targets(node: Any, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every (path, target, arguments) in a plain config."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, node["_target_"], {k: v for k, v in node.items() if not k.startswith("_")}
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}.{index}")


def check_keys(cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str] = ()) -> None:
    """Refuse keys that no config group declares: Hydra merges a misspelt key of an experiment file silently.

    Args:
        choices: the option chosen in each group, as Hydra's runtime reports them.
        overrides: of the command line; what it adds with `+` is meant where a signature judges it.

    Raises:
        ConfigError: naming the key and the closest one that exists.
    """
    for name, choice in choices.items():
        if choice is not None and choice.startswith("_"):
            raise ConfigError(f"{name}={choice} is what the options of {name} share; choose one of those")
    groups = [f"{name}={choice}" for name, choice in choices.items() if not name.startswith("hydra/")]
    plain = [choice for choice in groups if choice.split("=")[0] not in PRESETS]
    _check_deleted(cfg, [override[1:].partition("=")[0] for override in overrides if override[:1] == "~"])
    with _hydra_initialized():
        declared = compose("config", overrides=[*plain, *(f"{name}=none" for name in PRESETS)])
    known = set(_paths(OmegaConf.to_container(declared)))
    # A diagnostic that is left out has no keys.
    known |= {f"diagnostics.{name}" for name in declared.diagnostics if cfg.diagnostics.get(name, 0) is None}
    added = [override for override in overrides if override.startswith("+")]
    for path in _paths(OmegaConf.to_container(cfg)):
        if path not in known and not (_is_set_by(path, added) and _is_judged(cfg, path)):
            raise ConfigError(_unknown(path, cfg, known, _is_set_by(path, overrides)))


def _hydra_initialized() -> AbstractContextManager[Any]:
    """Initialise Hydra with CONF_DIR, unless the caller has initialised it."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR))


def _check_deleted(cfg: DictConfig, keys: Sequence[str]) -> None:
    """Refuse to leave out, by `~`, what a run reads; what a constructor takes it judges itself."""
    for key in keys:
        is_option = key in PRESETS or key.startswith("diagnostics.")
        if not is_option and (key.endswith("_target_") or not _is_judged(cfg, key)):
            off = f"{key}=none" if (CONF_DIR / key / "none.yaml").is_file() else f"{key}=..."
            raise ConfigError(f"~{key} takes away what every run reads; write {off}")


PRESETS = ("experiment", "recipe", "debug")
"""Groups that set keys of others and have none of their own."""
CHECKED = ("cache.", "reward.", "algorithm.kl.")
"""Nodes without `_target_` that a constructor takes whole, and so refuses what it does not know."""


def _is_judged(cfg: DictConfig, path: str) -> bool:
    """True if a target's signature or a constructor checks the keys at this place."""
    names = path.split(".")
    above = [OmegaConf.select(cfg, ".".join(names[:n])) for n in range(1, len(names) + 1)]
    has_target = any(isinstance(node, DictConfig) and "_target_" in node for node in above)
    return has_target or path.startswith(CHECKED)


def _is_set_by(path: str, overrides: Sequence[str]) -> bool:
    keys = [override.lstrip("+").split("=")[0] for override in overrides]
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _unknown(path: str, cfg: DictConfig, known: set[str], is_typed: bool) -> str:
    """Return the error for a key that no group declares, or that replaces a node of several keys."""
    below = [key.removeprefix(f"{path}.") for key in known if key.startswith(f"{path}.")]
    inner = [key for key in below if not key.startswith("_")]
    if inner:
        off = "; null leaves it out" if path.startswith("diagnostics.") else ""
        return (
            f"{path}={OmegaConf.select(cfg, path)} takes the place of {', '.join(sorted(inner))}; "
            f"set these one by one{off}"
        )
    places = {key for leaf in known for key in (leaf, leaf.rpartition(".")[0])}
    close = closest(path, places)
    hint = f"did you mean {close!r}?" if close else "see --cfg job for all keys"
    where = "on the command line" if is_typed else "in the preset of experiment, recipe or debug"
    return f"unknown key {path!r} {where}: {hint}"


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _paths(value, f"{prefix}{key}.")
    else:
        yield prefix.rstrip(".")


def expanded(path: str | None) -> str | None:
    """A model path with `~` replaced; names on the hub stay as they are."""
    return str(Path(path).expanduser()) if path is not None and is_local(path) else path


def is_local(path: str) -> bool:
    """True if a model path means a folder; a name on the hub is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()
