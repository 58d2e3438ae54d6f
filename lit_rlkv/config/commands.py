"""Rules for what is asked of a saved run: to score it, and to export it."""

from collections.abc import Collection
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import is_count, is_number
from lit_rlkv.config.building import as_config_errors, require
from lit_rlkv.kernels.backend import KERNELS
from lit_rlkv.kvcache.policies import load_policy_class

OF_THE_RUN = ("environment", "evaluation", "wandb")
"""JSON files that a run folder has without an evaluation by hand."""
DTYPES = ("float32", "bfloat16", "float16")


def check_evaluation(asked: DictConfig) -> None:
    """Refuse an evaluation that cannot be meant, before anything is loaded.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _check_given(asked, "ckpt")
    for name in ("n_prompts", "n_mismatch", "batch_size"):
        require(
            asked[name] is None or is_count(asked[name]),
            f"{name}={asked[name]} is not a count; give a whole number of at least 1, or null for the run's",
        )
    for name in ("n_samples", "n_resamples"):
        require(
            is_count(asked[name]),
            f"{name}={asked[name]} is not a count; give a whole number of at least 1",
        )
    temperature = asked.temperature
    require(
        temperature is None or (is_number(temperature) and temperature >= 0),
        f"temperature={temperature} is not a number of at least 0; give one, 0 for greedy",
    )
    require(
        is_number(asked.level) and 0 < asked.level < 1,
        f"level={asked.level} is no probability between 0 and 1; give 0.95 or so",
    )
    _check_lists(asked)
    _check_kernels(asked.kernels)
    require(
        isinstance(asked.name, str) and PurePath(asked.name).name == asked.name != "",
        f"name={asked.name} is no plain file name; the results lie in the run's folder, so leave out folders",
    )
    require(
        asked.name not in OF_THE_RUN,
        f"name={asked.name}: the run keeps {asked.name}.json itself; give another name",
    )


def _check_lists(asked: DictConfig) -> None:
    for name in ("budgets", "policies", "pass_at_k"):
        value = asked[name]
        require(
            OmegaConf.is_list(value) or (value is None and name != "pass_at_k"),
            f"{name}={value} is not a list; write {name}=[{value}]",
        )
    for policy in asked.policies or []:
        if policy != "dense":
            with as_config_errors("policies"):
                load_policy_class(policy)
    for budget in asked.budgets or []:
        require(is_count(budget), f"budgets: {budget!r} is no number of keys; give whole numbers")
    for k in asked.pass_at_k:
        require(
            is_count(k) and k <= asked.n_samples,
            f"pass_at_k: pass@{k} cannot be estimated from n_samples={asked.n_samples}; give k from 1 to "
            "n_samples, or raise that",
        )


def check_draws(n_samples: int, temperature: float | int) -> None:
    """Refuse several samples of a policy that draws nothing.

    Raises:
        ConfigError: they would all be the same.
    """
    require(
        n_samples == 1 or temperature > 0,
        f"n_samples={n_samples} responses at temperature={temperature} are {n_samples} times the same one; "
        "give temperature=1 or so, or n_samples=1",
    )


def check_export(asked: DictConfig) -> None:
    """Refuse an export that cannot be meant, before anything is loaded.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for name in ("ckpt", "to"):
        _check_given(asked, name)
    for name in ("overwrite", "heads"):
        require(
            isinstance(asked[name], bool),
            f"{name}={asked[name]} is neither true nor false; give one of them",
        )
    _check_choice("dtype", asked.dtype, DTYPES, "null for that of the run")


def _check_given(asked: DictConfig, name: str) -> None:
    is_missing = OmegaConf.is_missing(asked, name)
    value = None if is_missing else asked[name]
    example = "runs/NAME" if name == "ckpt" else "a folder to write"
    require(isinstance(value, str) and value != "", f"{name} is not given; add {name}=... ({example})")


def _check_kernels(value: Any) -> None:
    _check_choice("kernels", value, KERNELS, "null for those of the run")


def _check_choice(name: str, value: Any, known: Collection[str], or_else: str) -> None:
    require(
        value is None or value in known,
        f"{name}={value} is unknown; choose one of {', '.join(known)}, or {or_else}",
    )
