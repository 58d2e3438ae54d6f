"""From `_target_` nodes to objects: trusted targets and checked signatures."""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_rlkv.checks import MAX_NUMBER, is_finite, is_number, is_whole
from lit_rlkv.config.errors import ConfigError, as_config_errors, require
from lit_rlkv.config.options import show
from lit_rlkv.trust import KEY, is_of_python, is_trusted, is_trusted_code, trust_modules, trusted_modules

GGUF, GGUF_MAGIC, GGUF_PART = ".gguf", b"GGUF", re.compile(r"-\d+-of-\d+$")
TRUSTED = ("lit_rlkv.", "torch.optim.", "lightning.pytorch.loggers.")
"""Packages of which a config may name what `_may_be_named` allows."""
INSTANTIATE = ("_target_", "_partial_")
"""Keys that a node may have beside named arguments; `_args_` would pass a signature check unseen."""
NO_DEFAULT = inspect.Parameter.empty
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
)
"""Packages whose classes a config may name; others could write files or run programs."""
PARENTS = ("torch.optim", "lightning.pytorch.loggers")
"""Packages of others whose own classes a config may name, but none of a module below."""
WEIGHT_FUNCTIONS = tuple(
    f"lit_rlkv.objectives.corrections.{name}"
    for name in ("truncated", "masked", "sequence_truncated", "sequence_masked", "sparse_rl")
)
FUNCTIONS = (
    *WEIGHT_FUNCTIONS,
    "lit_rlkv.objectives.corrections.unweighted",
    "lit_rlkv.models.presets.tiny_qwen3",
    "lit_rlkv.rewards.judges.right_then_short",
    "lit_rlkv.tasks.preferences.load_preferences",
    "lit_rlkv.tasks.preferences.read_preferences",
    "lit_rlkv.tasks.problems.load_problems",
)
"""Functions that a config may name; a helper might call what a config gives it as an argument."""


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
            found = _located(target)
        except Exception as error:
            reason = error.__cause__ or error
            raise ConfigError(
                f"{where}._target_={target!r} cannot be imported: {type(reason).__name__}: {reason}"
            ) from error
        if not _may_be_named(target, found):
            raise ConfigError(
                f"{where}._target_ must be a class or function that a config may name, got {target!r}; "
                "choose one of those in conf/"
            )
        takes, takes_any = _arguments_of(found)
        for name, value in arguments.items():
            if name not in takes and not takes_any:
                raise ConfigError(f"{target}: unexpected {name!r}; it takes {', '.join(takes)}")
            if name in takes:
                _check_kind(f"{where}.{name}".lstrip("."), value, takes[name].annotation)


def _may_be_named(target: str, found: Any) -> bool:
    """True for what a trusted module of the user defines, public classes of HOMES and PARENTS, and FUNCTIONS.

    A module also holds what it imports, torch.load among it; only what it defines is meant.
    """
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return False
    name = f"{found.__module__}.{found.__qualname__}"
    if is_trusted(name) or name in FUNCTIONS:
        return True
    is_of_ours = name.startswith(HOMES) and not found.__name__.startswith("_")
    return inspect.isclass(found) and (is_of_ours or target.rpartition(".")[0] in PARENTS)


def _located(target: str) -> Any:
    """Return what a dotted name means, without the lines in which Hydra logs the error that it raises."""
    logger = logging.getLogger("hydra.utils")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return get_object(target)
    finally:
        logger.disabled = was_disabled


def check_policy_trust(policy: str) -> None:
    """Check that a policy of the user's own is in a trusted module; its class is not imported.

    Raises:
        ConfigError: naming the key that allows it.
    """
    _check_trust({"cache": {"policy": policy}}, "")


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


def user_code(functions: Mapping[str, Any]) -> dict[str, str]:
    """Return the Python file, command line or service that reward functions use, by their names.

    A service gets what the model writes, and the content of the environment variable in `token_env`.
    """
    found = {}
    for name, node in functions.items():
        if not isinstance(node, Mapping | DictConfig):
            continue
        if str(node.get("_target_")).endswith(".PythonFunction"):
            found[str(name)] = str(node.get("path")).rpartition(":")[0]
        elif str(node.get("_target_")).endswith(".Command"):
            found[str(name)] = " ".join(map(str, node.get("argv") or ()))
        elif str(node.get("_target_")).endswith(".Endpoint"):
            found[str(name)] = str(node.get("url"))
    return found


def check_saved_code(functions: Mapping[str, Any]) -> None:
    """Check that the command line trusts files, programs and services of a saved run's reward functions.

    Raises:
        ConfigError: naming what would be used, and the key that allows it.
    """
    refused = {name: code for name, code in user_code(functions).items() if not is_trusted_code(code)}
    if refused:
        runs = " and ".join(f"reward.functions.{name} uses {code!r}" for name, code in refused.items())
        trusted = ",".join(f"'{code}'" for code in refused.values())
        raise ConfigError(
            f'{runs}, which a saved config cannot allow by itself; if you trust it, add "{KEY}=[{trusted}]" '
            "to the command line"
        )


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
        require(not is_of_python(target), f"{where}={target!r} is not what a config may name; see conf/")
    if refused:
        modules = ",".join(sorted({target.partition(".")[0] for target in refused.values()}))
        given = ", ".join(f"{where}={target!r}" for where, target in refused.items())
        trusted = ", ".join((*TRUSTED, *trusted_modules()))
        raise ConfigError(
            f"{given} is not from a trusted package ({trusted}); if you trust the code of {modules}, add "
            f"{KEY}=[{modules}] to the command line"
        )


def _check_kind(name: str, value: Any, annotation: Any) -> None:
    """Check that a value has the type of the argument that receives it, and that its numbers are finite."""
    if annotation is bool and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {show(value)}")
    if annotation is int and not is_whole(value):
        raise ConfigError(f"{name} must be a whole number, got {show(value)}")
    if annotation in (float, float | int) and not is_number(value):
        raise ConfigError(f"{name} must be a number, got {show(value)}")
    for key, number in _numbers(name, value):
        if not is_finite(number) or abs(number) > MAX_NUMBER:
            raise ConfigError(
                f"{key} must be a finite number of at most {MAX_NUMBER:g} in size, got {show(number)}"
            )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each number in an argument; nodes with a `_target_` are their own."""
    if is_number(value):
        yield name, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}[{index}]", item)
    elif isinstance(value, Mapping) and "_target_" not in value:
        for key, item in value.items():
            yield from _numbers(f"{name}.{key}", item)


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


def default_argument(target: str, name: str) -> Any:
    """Return the default of an argument of a target that a config may name; `NO_DEFAULT` without one."""
    check_targets({"_target_": target})
    parameter = _arguments_of(get_object(target))[0].get(name)
    return NO_DEFAULT if parameter is None else parameter.default


def _targets(node: Any, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every (path, target, arguments) in a plain config."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            unnamed = sorted(str(key) for key in node if str(key).startswith("_") and key not in INSTANTIATE)
            require(
                not unnamed,
                f"{path}.{', '.join(unnamed)} must be arguments by name, beside {' and '.join(INSTANTIATE)}",
            )
            partial = node.get("_partial_")
            require(
                partial is None or isinstance(partial, bool),
                f"{path}._partial_ must be true or false, got {show(partial)}",
            )
            yield path, node["_target_"], {k: v for k, v in node.items() if not str(k).startswith("_")}
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}.{index}")


def expanded(path: str | None) -> str | None:
    """A model path with `~` replaced; names on the hub stay as they are."""
    return str(Path(path).expanduser()) if path is not None and is_local(path) else path


def find_gguf(path: str) -> Path | None:
    """Return the GGUF file that a model path means: the file, or the only one in a folder without a config.

    Raises:
        ConfigError: the file is no GGUF file or one of several parts, or the folder has several.
    """
    place = Path(path).expanduser()
    if place.is_dir() and not (place / "config.json").is_file():
        files = sorted(place.glob(f"*{GGUF}"))
        require(
            len(files) <= 1,
            f"model.path={path} has {len(files)} GGUF files; give one of them: "
            f"{', '.join(file.name for file in files)}",
        )
    else:
        files = [place] if place.suffix == GGUF and place.is_file() else []
    if not files:
        return None
    with files[0].open("rb") as opened:
        has_magic = opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    require(has_magic, f"model.path={path}: {files[0].name} is no GGUF file; download it again")
    require(
        not GGUF_PART.search(files[0].stem),
        f"model.path={path}: {files[0].name} is one of several parts; join them first: "
        "llama-gguf-split --merge FIRST_PART WHOLE.gguf",
    )
    return files[0]


def is_local(path: str) -> bool:
    """True if a model path means a folder or file; a name on the hub is NAME or OWNER/NAME."""
    return (
        path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(GGUF) or Path(path).exists()
    )
