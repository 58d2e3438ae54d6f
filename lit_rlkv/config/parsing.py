"""From composed YAML to a checked `Config`: types and ranges by the schema, then rules between keys.

It does not import torch, so a mistake is answered at once. `lit_rlkv.runs.preflight` checks the objects.
"""

import os
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.cache_rules import DENSE, POLICY_NAMES, check_no_options, check_policy_name, check_sizes
from lit_rlkv.checks import Range
from lit_rlkv.config.errors import as_config_errors, interpolations_as_config_errors, require
from lit_rlkv.config.options import convert, named_items, show
from lit_rlkv.config.schema import Config, SFTConfig, Stage
from lit_rlkv.config.targets import WEIGHT_FUNCTIONS, check_policy_trust, find_gguf, is_local

Schema = TypeVar("Schema")
STAGES: tuple[Stage, ...] = ("sft", "rl", "eval")
AUTO = "auto"
"""Value of `resume` that finds the run by its config."""
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""File name of the model of `recipe=smollm2`."""
GRADIENT_DIAGNOSTICS = "lit_rlkv.callbacks.gradient_"


def parse(schema: type[Schema], cfg: DictConfig, **others: Any) -> Schema:
    """Return a composed config as its dataclass, with interpolations resolved.

    Args:
        others: fields of the dataclass that are not keys.

    Raises:
        ConfigError: a key is not given, or breaks a rule of the schema.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    is_or_are = "is" if len(missing) == 1 else "are"
    require(
        not missing,
        f"{', '.join(missing)} {is_or_are} not given; add {' '.join(f'{name}=...' for name in missing)}",
    )
    with interpolations_as_config_errors():
        values = OmegaConf.to_container(cfg, resolve=True)
    return convert(schema, cast(dict[str, Any], values), **others)


def check_types(cfg: DictConfig) -> Config:
    """Return the config of a run, of which only the types and ranges of its keys are checked.

    Raises:
        ConfigError: a key is unknown or not given, or a value has the wrong type or is out of its range.
    """
    with interpolations_as_config_errors():
        source = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    config = parse(Config, cfg, source=source)
    algorithm = config.algorithm
    nodes = {
        "task": config.task,
        "model.preset": config.model.preset or None,
        "algorithm.advantage": algorithm.advantage,
        "algorithm.loss": algorithm.loss,
        "correction": config.correction,
        "distillation": config.distillation,
        "optimizer": config.optimizer,
        "sft.optimizer": config.sft.optimizer,
        "logger": config.logger,
        **{f"diagnostics.{name}": node for name, node in named_items(config.diagnostics)},
    }
    for name, node in nodes.items():
        target = node.get("_target_") if isinstance(node, DictConfig) else node
        require(
            node is None or (isinstance(node, DictConfig) and isinstance(target, str)),
            f"{name} must name its class or function in _target_, got {show(target)}; give {name}._target_",
        )
    return config


def parse_config(cfg: DictConfig) -> Config:
    """Return the config of a run, checked as far as that needs no objects.

    Raises:
        ConfigError: the first rule that is broken.
    """
    config = check_types(cfg)
    for check in (
        _check_stages,
        _check_sft,
        _check_model,
        _check_cache,
        _check_weights_of_responses,
        _check_optimizers,
        _check_rollout,
        _check_fabric,
        _check_losses,
    ):
        check(config)
    return config


def check_folders(cfg: DictConfig) -> None:
    """Check the folders of a run, and of the run that it resumes.

    Raises:
        ConfigError: a folder is not given, or cannot be made.
    """
    runs_dir, resume = cfg.get("runs_dir"), cfg.get("resume")
    require(
        isinstance(runs_dir, str) and runs_dir != "",
        f"runs_dir must be a folder, got {show(runs_dir)}; give one, such as runs_dir=runs",
    )
    require(
        resume is None or (isinstance(resume, str) and resume != ""),
        f"resume must be the folder of a run, got {show(resume)}; give resume=runs/NAME, or resume=auto",
    )
    asked = {"runs_dir": runs_dir, "resume": resume, "hydra.run.dir": OmegaConf.select(cfg, "hydra.run.dir")}
    for name, folder in asked.items():
        home = os.path.expanduser(str(folder))
        require(not str(folder).startswith("~"), f"{name}={folder}: ~ is not expanded here; give {home}")
        if folder is not None and name != "resume":
            _check_can_be_made(name, Path(folder))


def _check_can_be_made(name: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    reason = "" if there.is_dir() else f"{there} is a file"
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        reason = f"nothing can be written in {there}"
    require(not reason, f"{name}={folder} cannot be made, since {reason}; give another folder")


def _check_stages(cfg: Config) -> None:
    stages = cfg.stages
    require(len({*stages}) == len(stages), f"stages={show(stages)} names a stage twice; name each once")
    require(bool(stages), f"stages=[] leaves nothing to do; choose from {', '.join(STAGES)}")


def _check_sft(cfg: Config) -> None:
    sft = cfg.sft
    for name, n_steps in _pass_lengths(sft).items():
        require(
            n_steps % min(sft.steps_per_iteration, n_steps) == 0,
            f"sft.{name} must be a multiple of sft.steps_per_iteration={sft.steps_per_iteration}, got "
            f"{n_steps}; change one of them",
        )
    require(
        sft.joint or sft.n_pairs > 0,
        "sft.joint=false trains a reward model of its own, but sft.n_pairs=0 gives it nothing to learn from; "
        "raise it, or use sft.joint=true",
    )
    require(
        sft.n_pairs <= sft.batch_size,
        f"sft.n_pairs must be at most sft.batch_size={sft.batch_size}, got {sft.n_pairs}; lower it",
    )
    require(
        cfg.reward.learned == 0 or "sft" not in cfg.stages or sft.trains_reward_head,
        f"reward.learned={cfg.reward.learned} needs a reward head, but sft.n_pairs={sft.n_pairs} with "
        f"sft.reward_weight={sft.reward_weight} trains none; raise them",
    )


def _pass_lengths(sft: SFTConfig) -> dict[str, int]:
    """Return the number of steps of each pass, by key."""
    lengths = {"n_steps": sft.n_steps}
    if not sft.joint:
        lengths["reward_steps"] = sft.reward_steps
    if sft.on_policy_pairs.n_prompts > 0:
        lengths["on_policy_pairs.n_steps"] = sft.on_policy_pairs.n_steps
    return lengths


def _check_model(cfg: Config) -> None:
    path = cfg.model.path
    require(
        path is not None or bool(cfg.model.preset),
        "model has neither path nor preset; give model.path=... or model=tiny",
    )
    if path is not None and is_local(path):
        require(
            (Path(path).expanduser() / "config.json").is_file() or find_gguf(path) is not None,
            f"model.path={path} is not a checkpoint folder (no config.json there) and no GGUF file; give a "
            "folder written by save_pretrained, a file .gguf, or a hub name"
            + ("; `make smollm2` fetches this one" if Path(path).name == SMOLLM2 else ""),
        )
    require(
        cfg.fabric.quantization is None or path is not None,
        f"fabric.quantization={cfg.fabric.quantization} is of a checkpoint; give model.path, or use null",
    )


def _check_cache(cfg: Config) -> None:
    cache = cfg.cache
    budgets = {"cache": (cache.budget,), "evaluation.budgets": cfg.evaluation.budgets}
    with as_config_errors("cache"):
        check_policy_name(cache.policy)
        if cache.policy in (DENSE, *POLICY_NAMES):
            check_no_options(cache.policy, dict(named_items(cache.policy_options)))
    check_policy_trust(cache.policy)
    for where, sizes in budgets.items():
        for budget in sizes:
            with as_config_errors(where):
                check_sizes(
                    budget=budget,
                    interval=cache.interval,
                    sink=cache.sink,
                    window=cache.window,
                    is_dense=cache.policy == DENSE,
                )


def _check_weights_of_responses(cfg: Config) -> None:
    """Check the bounds of importance weights; a function of the user's own has options of its own."""
    if _weight_function(cfg) not in WEIGHT_FUNCTIONS:
        return
    bounds = dict(named_items(cfg.correction.weight_fn))
    for name, value in bounds.items():
        bound = Range(above=0) if name in ("cap", "high") else Range(least=0)
        _check_number(bound, f"correction.weight_fn.{name}", value, "it bounds a ratio of probabilities")
    low, high = bounds.get("low"), bounds.get("high")
    require(
        low is None or high is None or low < high,
        f"correction.weight_fn.low must be below correction.weight_fn.high={high}, got {low}; else nothing "
        "would count; lower it",
    )


def _weight_function(cfg: Config) -> str:
    return str((cfg.correction.get("weight_fn") or {}).get("_target_"))


def _check_optimizers(cfg: Config) -> None:
    for name, node in {"optimizer": cfg.optimizer, "sft.optimizer": cfg.sft.optimizer}.items():
        _check_number(Range(above=0), f"{name}.lr", node.get("lr"), "it is the learning rate")


def _check_number(bound: Range, name: str, value: Any, hint: str) -> None:
    require(bound.holds(value), f"{name} must be {bound.describe(value=value)}, got {show(value)}; {hint}")


def _check_rollout(cfg: Config) -> None:
    group_size, rows = cfg.algorithm.group_size, cfg.rollout.max_rows
    require(
        rows is None or rows >= group_size,
        f"rollout.max_rows must be at least algorithm.group_size={group_size}, or null for all, got {rows}; "
        "the responses to one prompt start together",
    )


def _check_fabric(cfg: Config) -> None:
    fabric = cfg.fabric
    if fabric.strategy != "fsdp2":
        return
    require(
        fabric.precision != "16-mixed",
        "fabric.precision=16-mixed scales losses by what it finds in whole gradients, which no rank has "
        "under fabric.strategy=fsdp2; use bf16-mixed",
    )
    require(
        fabric.quantization is None,
        f"fabric.quantization={fabric.quantization} packs weights in a way that fabric.strategy=fsdp2 "
        "cannot shard; use one of the two",
    )
    for name, node in named_items(cfg.diagnostics):
        require(
            node is None or not str(node.get("_target_")).startswith(GRADIENT_DIAGNOSTICS),
            f"diagnostics.{name} compares whole gradients, which no rank has under fabric.strategy=fsdp2; "
            f"add diagnostics.{name}=null",
        )


def _check_losses(cfg: Config) -> None:
    distillation = cfg.distillation
    is_dense = cfg.correction.get("samples_dense") or cfg.cache.policy == DENSE
    require(
        distillation is None or distillation.get("weight") == 0 or not is_dense,
        "distillation needs an evicting cache in the rollouts: with a dense one both tracks are the same; "
        "use distillation=none or distillation=anchor, or another correction and cache.policy",
    )
    weight_fn = _weight_function(cfg)
    require(
        not cfg.correction.get("bypass_mode") or weight_fn not in WEIGHT_FUNCTIONS,
        f"correction.bypass_mode=true takes the sampler's log-probs for π_old, so {weight_fn} would give "
        "every token weight 1; use correction.bypass_mode=false, which scores π_old before the update",
    )
    require(
        cfg.algorithm.policy_weight > 0 or distillation is not None,
        "algorithm.policy_weight=0 leaves the policy nothing to learn from; raise it, or choose a "
        "distillation",
    )
