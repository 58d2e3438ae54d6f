"""From `_target_` nodes to objects: trusted targets and checked signatures."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_rlkv.checks import is_number, is_whole
from lit_rlkv.config.errors import ConfigError, as_config_errors, one_line, require
from lit_rlkv.settings import show
from lit_rlkv.trust import KEY, is_trusted, located, trust_modules, trusted_modules

OURS = "lit_rlkv.reporting.loggers."
LOW_BIT = "torchao.optim."
CALLBACKS, OPTIMIZERS = ("lit_rlkv.callbacks.",), ("torch.optim.", LOW_BIT)
ALLOWED = {
    "task": ("lit_rlkv.tasks.",),
    "environment": ("lit_rlkv.environments.",),
    "model": ("lit_rlkv.models.presets.",),
    "algorithm": ("lit_rlkv.experience.advantages.", "lit_rlkv.modules.", "lit_rlkv.objectives.gains."),
    "correction": ("lit_rlkv.objectives.corrections.",),
    "distillation": CALLBACKS,
    "reward": ("lit_rlkv.rewards.functions.",),
    "optimizer": OPTIMIZERS,
    "sft": OPTIMIZERS,
    "diagnostics": CALLBACKS,
    "user_callbacks": CALLBACKS,
    "logger": (
        OURS,
        *(
            f"lightning.pytorch.loggers.{name}"
            for name in ("comet.", "csv_logs.CSVLogger", "litlogger.", "mlflow.", "tensorboard.", "wandb.")
        ),
    ),
}
"""How the full names begin of the public classes and functions that a config may name, by the config group.

Others could write files or run programs; those of the user's own need `trusted_modules`.
"""
IMPORTABLE = ("lit_rlkv.", *OPTIMIZERS, "lightning.pytorch.loggers.")
"""Packages that export these under shorter names, and that a config may therefore import."""
WITH_FUNCTIONS = (
    "lit_rlkv.models.presets.",
    "lit_rlkv.objectives.corrections.",
    "lit_rlkv.objectives.gains.",
    "lit_rlkv.tasks.preferences.",
    "lit_rlkv.tasks.problems.",
)
"""Modules of which functions may be named, too; those of others are helpers, which may call what they get."""
INSTANTIATE = ("_target_", "_partial_")
"""Keys that a node may have beside named arguments; `_args_` would pass a signature check unseen."""
NO_DEFAULT = inspect.Parameter.empty


def build(node: DictConfig) -> Any:
    """The object (or, under `_partial_`, the function) that a node with `_target_` describes.

    Raises:
        ConfigError: a target that no group allows, or arguments that it does not take.
    """
    check_targets(node)
    key = node._get_full_key(None)  # a node that was taken out of its config knows no more than its name
    with as_config_errors(key if "." in key else node._target_):
        return instantiate(node, _convert_="all")  # a checkpoint of an optimizer loads plain lists alone


def check_targets(node: Any, path: str = "") -> None:
    """Check that every `_target_` below a node may stand there and takes its arguments; build nothing.

    Args:
        path: of the node in the config; without it a target of any group passes.

    Raises:
        ConfigError: naming the target, and the key that allows it.
    """
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    targets = [*_targets(node, path)]
    policy = (node.get("cache") or {}).get("policy") if isinstance(node, Mapping) else None
    check_importable({f"{where}._target_".lstrip("."): str(target) for where, target, _ in targets}, policy)
    for where, target, arguments in targets:
        key = f"{where}._target_".lstrip(".")
        try:
            found = located(target)
        except Exception as error:
            remedy = '; pip install -e ".[lowbit]"' if target.startswith(LOW_BIT) else ""
            raise ConfigError(f"{key}={target!r} cannot be imported: {one_line(error)}{remedy}") from error
        require(
            _may_be_named(found, ALLOWED.get(where.partition(".")[0], sum(ALLOWED.values(), ()))),
            f"{key} must be a class or function that a config may name there, got {target!r}; choose one of "
            "those in conf/",
        )
        takes, takes_any = _arguments_of(found)
        for name, value in arguments.items():
            is_taken = name in takes or takes_any
            require(is_taken, f"{target}: unexpected {name!r}; it takes {', '.join(takes)}")
            if name in takes:
                _check_kind(f"{where}.{name}".lstrip("."), value, takes[name].annotation)


def check_importable(targets: Mapping[str, str], policy: str | None) -> None:
    """Refuse code that is neither of IMPORTABLE nor trusted, before it is imported.

    Args:
        targets: by their keys.
        policy: eviction policy; a dotted name is code of the user's own.

    Raises:
        ConfigError: naming all of it, and the key that allows it.
    """
    named = {key: target for key, target in targets.items() if not target.startswith(IMPORTABLE)}
    named |= {"cache.policy": policy} if isinstance(policy, str) and "." in policy else {}
    refused = {key: target for key, target in named.items() if not is_trusted(target)}
    modules = ",".join(sorted({target.partition(".")[0] for target in refused.values()}))
    require(
        not refused,
        f"{', '.join(f'{key}={target!r}' for key, target in refused.items())} is not from a trusted package; "
        f"if {modules} is code of your own, add {KEY}=[{modules}] to the command line",
    )


def _may_be_named(found: Any, allowed: tuple[str, ...]) -> bool:
    """True for what a trusted module defines, and for public classes and functions of the allowed names.

    A module also holds what it imports, torch.load among it; only what it defines is meant. Methods and
    nested classes are refused, because `_partial_` would let a config call them.
    """
    is_class = inspect.isclass(found)
    if not (is_class or inspect.isfunction(found)):
        return False
    name = f"{found.__module__}.{found.__qualname__}"
    is_public = "." not in found.__qualname__ and not found.__qualname__.startswith("_")
    is_allowed = name.startswith(allowed) and (is_class or name.startswith(WITH_FUNCTIONS))
    return is_trusted(name) or (is_public and is_allowed)


def grant_trust(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Take `trusted_modules` out of a config and trust the modules, if the command line itself sets the key.

    Raises:
        ConfigError: the key comes from a config file, or names a module that cannot be trusted.
    """
    with read_write(cfg), open_dict(cfg):
        names = cfg.pop(KEY, None)
    is_given = any(override.lstrip("+").partition("=")[0] == KEY for override in overrides)
    is_list = names is None or OmegaConf.is_list(names)
    require(is_list, f"{KEY}={names} is not a list; write {KEY}=[{names}]")
    require(
        is_given or not names,
        f"{KEY}={names} is set in a config file, which cannot grant trust; give it on the command line",
    )
    with as_config_errors(KEY):
        trust_modules(list(names or ()))


def user_code(functions: Mapping[str, Any]) -> dict[str, str]:
    """Return the Python file or service that reward functions use, by their names.

    A service gets what the model writes, and the content of the environment variable in `token_env`.
    """
    code_of = {
        "PythonFunction": lambda node: str(node.get("path")).rpartition(":")[0],
        "Endpoint": lambda node: str(node.get("url")),
    }
    nodes = {str(name): node for name, node in functions.items() if isinstance(node, Mapping | DictConfig)}
    kinds = {name: str(node.get("_target_")).rpartition(".")[2] for name, node in nodes.items()}
    return {name: code_of[kind](nodes[name]) for name, kind in kinds.items() if kind in code_of}


def check_saved_code(functions: Mapping[str, Any]) -> None:
    """Check that the command line trusts files and services of a saved run's reward functions.

    Raises:
        ConfigError: naming what would be used, and the key that allows it.
    """
    refused = {name: code for name, code in user_code(functions).items() if code not in trusted_modules()}
    used = " and ".join(f"reward.functions.{name} uses {code!r}" for name, code in refused.items())
    trusted = ",".join(f"'{code}'" for code in refused.values())
    require(
        not refused,
        f'{used}, which a saved config cannot allow by itself; if you trust it, add "{KEY}=[{trusted}]" to '
        "the command line",
    )


def _check_kind(name: str, value: Any, annotation: Any) -> None:
    """Check that a value has the type of the argument that receives it."""
    if get_origin(annotation) is Annotated:  # its constructor checks the range
        annotation = get_args(annotation)[0]
    kinds = {bool: "true or false", int: "a whole number", float: "a number", float | int: "a number"}
    holds = isinstance(value, bool) if annotation is bool else is_number(value)
    holds = is_whole(value) if annotation is int else holds
    require(holds or annotation not in kinds, f"{name} must be {kinds.get(annotation)}, got {show(value)}")


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
    parameter = _arguments_of(located(target))[0].get(name)
    return NO_DEFAULT if parameter is None else parameter.default


def _targets(node: Any, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every (path, target, arguments) in a plain config."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, Mapping) and "_target_" in node:
        unnamed = sorted(str(key) for key in node if str(key).startswith("_") and key not in INSTANTIATE)
        require(not unnamed, f"{path}.{', '.join(unnamed)} must be arguments by name")
        partial = node.get("_partial_", False)
        require(isinstance(partial, bool), f"{path}._partial_ must be true or false, got {show(partial)}")
        yield path, node["_target_"], {k: v for k, v in node.items() if not str(k).startswith("_")}
    for key, value in items:
        yield from _targets(value, f"{path}.{key}".lstrip("."))
