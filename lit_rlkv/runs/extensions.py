"""Checks that the classes named in a config are of the right kind; a user's modules may get it wrong."""

import inspect

from hydra.utils import get_object
from lightning import Callback
from omegaconf import DictConfig

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.config import Config, ConfigError, as_config_errors, build, require
from lit_rlkv.config.options import named_items
from lit_rlkv.experience.advantages import AdvantageEstimator
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.tasks import Task


def check_extensions(cfg: Config) -> None:
    """Refuse a task, algorithm, model preset or callback of the wrong kind.

    Raises:
        ConfigError: naming the key and the class that is needed.
    """
    _check_class("algorithm.advantage", cfg.algorithm.advantage, AdvantageEstimator)
    _check_class("algorithm.loss", cfg.algorithm.loss, PolicyModule)
    for name, node in {"algorithm.loss": cfg.algorithm.loss, "model.preset": cfg.model.preset}.items():
        require(
            not node or bool(node.get("_partial_")),
            f"{name} must have _partial_: true, as the run adds arguments; add +{name}._partial_=true",
        )
    task = build(cfg.task)
    missing = [name for name in ("is_verifiable", "sample", "score", "corrupt") if not hasattr(task, name)]
    require(
        isinstance(task, Task),
        f"task._target_={cfg.task._target_} must be a task, and has no {', '.join(missing)}; see "
        "lit_rlkv.tasks.Task",
    )
    build_user_callbacks(cfg)


def build_user_callbacks(cfg: Config) -> list[Callback]:
    """Build the callbacks under `user_callbacks`, in the order of the config.

    Raises:
        ConfigError: a node names no callback, or a callback has a hook that is never called.
    """
    callbacks = []
    for name, node in named_items(cfg.user_callbacks):
        where = f"user_callbacks.{name}"
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ConfigError(
                f"{where}={node} must name a callback; give {where}._target_=mypackage.callbacks.MyCallback"
            )
        callbacks.append(build(node))
        with as_config_errors(where):
            check_hooks(callbacks[-1:])
    return callbacks


def _check_class(where: str, node: DictConfig, kind: type) -> None:
    """Refuse a target that is not a class of this kind."""
    found = get_object(node._target_)
    require(
        inspect.isclass(found) and issubclass(found, kind),
        f"{where}._target_={node._target_} must be a subclass of {kind.__module__}.{kind.__name__}",
    )
