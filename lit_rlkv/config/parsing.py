"""From composed YAML to a checked `Config`: types and ranges by the schema, then rules between keys.

It does not import torch, so a mistake is answered at once. `lit_rlkv.runs.preflight` checks the objects.
"""

import os
from functools import reduce
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import Range
from lit_rlkv.config.errors import interpolations_as_config_errors, require
from lit_rlkv.config.model_path import check_source
from lit_rlkv.config.options import by_its_group, check_leaves, convert, named_items
from lit_rlkv.config.schema import Config, Stage
from lit_rlkv.config.targets import LOW_BIT
from lit_rlkv.settings import leaf_keys, show

Schema = TypeVar("Schema")
STAGES: tuple[Stage, ...] = ("sft", "rl", "eval")
AUTO = "auto"
"""Value of `resume` that finds the run by its config."""
GRADIENT_DIAGNOSTICS = "lit_rlkv.callbacks.gradient_"
WEIGHT_FUNCTIONS = tuple(
    f"lit_rlkv.objectives.corrections.{name}"
    for name in ("truncated", "masked", "sequence_truncated", "sequence_masked", "sparse_rl")
)


def parse(schema: type[Schema], cfg: DictConfig) -> Schema:
    """Return a composed config as its dataclass, with interpolations resolved.

    Raises:
        ConfigError: a key is not given, or breaks a rule of the schema.
    """
    return convert(schema, _resolved(cfg))


def _resolved(cfg: DictConfig) -> dict[str, Any]:
    missing = sorted(OmegaConf.missing_keys(cfg))
    settings = " ".join(f"{key}=..." for key in missing)
    require(not missing, f"{', '.join(missing)} must be given; add {settings}")
    with interpolations_as_config_errors():
        return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


def check_types(cfg: DictConfig) -> Config:
    """Return the config of a run, of which only the types and ranges of its keys are checked.

    Raises:
        ConfigError: a key is unknown or not given, or a value has the wrong type or is out of its range.
    """
    plain = _resolved(cfg)
    require("source" not in plain, "unknown key 'source'; docs/reference/config.md has all keys")
    config = convert(Config, plain | {"source": OmegaConf.create(plain)})
    check_leaves(plain)
    chosen = [name for name, key in leaf_keys(Config) if key.default_factory is by_its_group]
    nodes = {key: reduce(getattr, key.split("."), cast(Any, config)) for key in chosen}
    nodes |= {f"diagnostics.{name}": node for name, node in named_items(nodes.pop("diagnostics"))}
    users = {"user_callbacks": config.user_callbacks, "reward.functions": config.reward.functions}
    for group, named in users.items():  # none of these can be null
        nodes |= {f"{group}.{name}": node or OmegaConf.create() for name, node in named_items(named)}
    nodes |= {"model.preset": config.model.preset or None, "environment": config.environment}
    nodes |= {"sft.optimizer": config.sft.optimizer}
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
    for check in (_check_stages, _check_model, _check_numbers, _check_fabric, _check_losses):
        check(config)
    return config


def check_folders(cfg: DictConfig) -> None:
    """Check the names of the folder of runs, and of the run to resume.

    Raises:
        ConfigError: one is not the name of a folder.
    """
    for name, example in {"runs_dir": "runs", "resume": f"runs/NAME, or resume={AUTO}"}.items():
        folder = cfg.get(name)
        require(
            (isinstance(folder, str) and folder != "") or (folder is None and name == "resume"),
            f"{name} must be a folder, got {show(folder)}; give {name}={example}",
        )
        home = os.path.expanduser(str(folder))
        require(not str(folder).startswith("~"), f"{name}={folder}: ~ is not expanded here; give {home}")


def _check_stages(cfg: Config) -> None:
    sft, steps = cfg.sft, {"n_steps": cfg.sft.n_steps}
    steps |= {} if sft.joint else {"reward_steps": sft.reward_steps}
    steps |= {"eviction_steps": sft.eviction_steps} if sft.eviction_steps > 0 else {}
    if sft.on_policy_pairs.n_prompts > 0:
        steps["on_policy_pairs.n_steps"] = sft.on_policy_pairs.n_steps
    require(
        len(set(cfg.stages)) == len(cfg.stages),
        f"stages={show(cfg.stages)} names a stage twice; name each once",
    )
    require(bool(cfg.stages), f"stages=[] leaves nothing to do; choose from {', '.join(STAGES)}")
    for name, n_steps in steps.items():
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


def _check_model(cfg: Config) -> None:
    path = cfg.model.path
    require(
        path is not None or bool(cfg.model.preset),
        "model has neither path nor preset; give model.path=... or model=tiny",
    )
    require(
        not cfg.model.preset or bool(cfg.model.preset.get("_partial_")),
        "model.preset must have _partial_: true, as the run adds arguments; add +model.preset._partial_=true",
    )
    if path is not None:
        check_source(path)
    teacher = None if cfg.distillation is None else cfg.distillation.get("model")
    if isinstance(teacher, str) and "rl" in cfg.stages:
        check_source(teacher, "distillation.model")
    require(
        cfg.fabric.quantization is None or path is not None,
        f"fabric.quantization={cfg.fabric.quantization} is of a checkpoint; give model.path, or use null",
    )


def _check_numbers(cfg: Config) -> None:
    """Check learning rates, rows, and bounds of importance weights by functions of lit_rlkv."""
    bounds = dict(named_items(cfg.correction.weight_fn)) if _weight_function(cfg) in WEIGHT_FUNCTIONS else {}
    numbers = {"optimizer.lr": cfg.optimizer.get("lr"), "sft.optimizer.lr": cfg.sft.optimizer.get("lr")}
    numbers |= {f"correction.weight_fn.{name}": value for name, value in bounds.items()}
    for name, value in numbers.items():
        bound = Range(above=0) if name.endswith(("lr", "cap", "high")) else Range(least=0)
        require(bound.holds(value), f"{name} must be {bound.describe(value=value)}, got {show(value)}")
    low, high = bounds.get("low"), bounds.get("high")
    require(
        low is None or high is None or low < high,
        f"correction.weight_fn.low must be below correction.weight_fn.high={high}, got {low}; lower it",
    )
    group_size, rows = cfg.algorithm.group_size, cfg.rollout.max_rows
    require(
        rows is None or rows >= group_size,
        f"rollout.max_rows must be at least algorithm.group_size={group_size}, or null for all, got {rows}; "
        "the responses to one prompt start together",
    )


def _weight_function(cfg: Config) -> str:
    return str((cfg.correction.get("weight_fn") or {}).get("_target_"))


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
    for name, optimizer in {"optimizer": cfg.optimizer, "sft.optimizer": cfg.sft.optimizer}.items():
        require(
            not str(optimizer.get("_target_")).startswith(LOW_BIT),
            f"{name}: 8-bit states cannot be gathered from shards (fabric.strategy=fsdp2), which divide the "
            "states of AdamW over the devices anyhow; use optimizer=adamw",
        )
    for name, node in named_items(cfg.diagnostics):
        require(
            node is None or not str(node.get("_target_")).startswith(GRADIENT_DIAGNOSTICS),
            f"diagnostics.{name} compares whole gradients, which no rank has under fabric.strategy=fsdp2; "
            f"add diagnostics.{name}=null",
        )


def _check_losses(cfg: Config) -> None:
    require(
        cfg.algorithm.resample == 0 or cfg.reward.normalize == "none",
        f"algorithm.resample={cfg.algorithm.resample} compares rewards within groups, round by round; use "
        "reward.normalize=none",
    )
    require(
        cfg.algorithm.resample == 0 or cfg.algorithm.group_size > 1,
        f"algorithm.resample={cfg.algorithm.resample} replaces groups of equal rewards, which a group of "
        "algorithm.group_size=1 always is; use resample=0, or larger groups",
    )
    reward, kl = cfg.reward, cfg.algorithm.kl
    require(
        cfg.algorithm.advantage.get("estimator") != "gdpo"
        or (reward.normalize == "none" and reward.clip is None and (kl.place == "loss" or kl.weight == 0)),
        "gdpo scales each part of the reward to one std; use reward.normalize=none, reward.clip=null and "
        f"algorithm.kl.place=loss, got {reward.normalize}, {show(reward.clip)} and {kl.place}",
    )
    require(
        not cfg.algorithm.advantage.get("greedy_baseline") or reward.normalize == "none",
        "greedy_baseline compares rewards with those of greedy responses, which reward.normalize="
        f"{reward.normalize} would scale in another way; use reward.normalize=none",
    )
    longest, buffer = cfg.rollout.max_new_tokens, cfg.reward.overlong_buffer
    require(
        buffer is None or buffer <= longest,
        f"reward.overlong_buffer must be at most rollout.max_new_tokens={longest}, got {buffer}; lower it",
    )
    distillation = cfg.distillation
    is_exact = cfg.cache.policy == "dense" and cfg.cache.dtype is None
    require(
        # Another model teaches the dense policy, too.
        distillation is None
        or "model" in distillation
        or distillation.get("weight") == 0
        or not (is_exact or cfg.correction.get("samples_dense")),
        "distillation needs an evicting or quantized cache: with a dense one both tracks are "
        "the same; use distillation=none or distillation=anchor, or another correction, cache.policy or "
        "cache.dtype",
    )
    weight_fn = _weight_function(cfg)
    require(
        not cfg.correction.get("bypass_mode") or weight_fn not in WEIGHT_FUNCTIONS,
        f"correction.bypass_mode=true takes the sampler's log-probs for π_old, so {weight_fn} would give "
        "every token weight 1; use correction.bypass_mode=false, which scores π_old before the update",
    )
