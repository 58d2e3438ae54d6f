"""RunContext: the objects that all stages of a run share."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from lightning.fabric import Fabric
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_rlkv.config import Config, ConfigError, as_config_errors, build, expanded, find_gguf, require
from lit_rlkv.config.options import named_items, show
from lit_rlkv.config.schema import RewardConfig
from lit_rlkv.data.tokenizers import load_tokenizer
from lit_rlkv.data.validation import N_CHECKED, Sizes, measure
from lit_rlkv.distributed.sharding import ShardedStrategy
from lit_rlkv.evaluation.evaluator import Accuracy, accuracy_of
from lit_rlkv.experience.reward import RewardRule
from lit_rlkv.kernels.backend import set_kernels, uses_triton
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.compiled_layers import check_compiler
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.reporting.progress import QUIET_S, ProgressMeter, track
from lit_rlkv.rewards import RewardFunction, RewardManager
from lit_rlkv.run_files import BACKBONE as BACKBONE
from lit_rlkv.run_files import CHECKPOINTS as CHECKPOINTS
from lit_rlkv.run_files import CONFIG as CONFIG
from lit_rlkv.run_files import EVALUATION as EVALUATION
from lit_rlkv.run_files import METRICS as METRICS
from lit_rlkv.run_files import REPORT as REPORT
from lit_rlkv.runs.launch import broadcast_from_rank_zero, fabric_precision
from lit_rlkv.tasks import Task, UserTask
from lit_rlkv.tasks.json_rows import reading_progress

CONVERTED_MODELS = "converted_models"
"""Folder in `runs_dir` of GGUF files converted to safetensors, which runs share."""
WEIGHT_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
}
"""Dtype of the weights for each `fabric.precision`."""


@dataclass(frozen=True)
class RunContext:
    """Config, processes, tokenizer, task and reward functions of a run."""

    cfg: Config
    fabric: Fabric
    tokenizer: PreTrainedTokenizerBase
    task: Task
    sizes: Sizes
    """Token counts of the task's texts, of all or of the first ones."""
    rewards: RewardManager
    """Reward functions; their workers start at the first call."""

    @property
    def is_sharded(self) -> bool:
        """True if the layers of backbones are sharded over the ranks."""
        return isinstance(self.fabric.strategy, ShardedStrategy)

    @property
    def cache(self) -> CacheSpec:
        """The cache of the config; a correction may sample rollouts with a dense one instead."""
        return cache_of(self.cfg)

    @property
    def accuracy(self) -> Accuracy:
        """The function that decides in evaluations if a response is correct."""
        return accuracy_of(self.task, self.rewards, self.cfg.reward.accuracy)


def cache_of(cfg: Config) -> CacheSpec:
    """Return the cache of a config."""
    return CacheSpec(**vars(cfg.cache))


def pretrained_path(path: str | None, runs_dir: str) -> str | None:
    """Return what transformers loads for a `model.path`: for a GGUF file, the folder it is converted to.

    Raises:
        ConfigError: the file cannot be converted.
    """
    file = None if path is None else find_gguf(path)
    if file is None:
        return expanded(path)
    with as_config_errors("model"):
        return str(converted_gguf(file, Path(runs_dir) / CONVERTED_MODELS))


def build_reward_functions(cfg: RewardConfig) -> dict[str, RewardFunction]:
    """Build the reward functions of a config by name; no code of the user runs yet.

    Raises:
        ConfigError: a node names no reward function, or the weights and names cannot work.
    """
    functions = {}
    for name, node in named_items(cfg.functions):
        where = f"reward.functions.{name}"
        require(
            isinstance(node, DictConfig) and "_target_" in node,
            f"{where} must name a reward function, got {node}; give {where}._target_, such as "
            "lit_rlkv.rewards.Numeric",
        )
        try:
            functions[name] = build(node)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        require(
            isinstance(functions[name], RewardFunction),
            f"{where}._target_ must be a reward function, got {node._target_}; choose one of "
            "lit_rlkv.rewards",
        )
    with as_config_errors("reward"):
        RewardRule(cfg, functions)
    return functions


def build_context(cfg: Config, fabric: Fabric | None = None) -> RunContext:
    """Build what all stages share; without `fabric` in one process on one device."""
    disable_progress_bar()  # transformers shows one for every load
    if cfg.fabric.n_threads is not None:
        torch.set_num_threads(cfg.fabric.n_threads)
    set_kernels(cfg.kernels)
    precision = fabric_precision(cfg.fabric.precision)
    fabric = fabric or Fabric(accelerator=cfg.fabric.accelerator, devices=1, precision=precision)
    _check_device(cfg, fabric.device)
    with as_config_errors("model"):
        path = broadcast_from_rank_zero(fabric, lambda: pretrained_path(cfg.model.path, cfg.runs_dir))
        tokenizer = load_tokenizer(path)
    task = build_task(cfg)
    rewards = RewardManager(build_reward_functions(cfg.reward))
    return RunContext(cfg, fabric, tokenizer, task, _measured(cfg, tokenizer, task), rewards)


def build_task(cfg: Config) -> Task:
    """Build the task of a config, and show the progress of reading its rows if that takes a while."""
    meter = ProgressMeter("% of rows read", quiet_s=QUIET_S)
    meter.start(0, 100)
    try:
        with reading_progress(lambda n_done, n_total: meter.show(100 * n_done / n_total, 100, {})):
            return cast(Task, build(cfg.task))
    finally:
        meter.stop()


def _check_device(cfg: Config, device: torch.device) -> None:
    """Refuse settings that the device does not support, before a model is loaded."""
    with as_config_errors("kernels"):
        has_kernels = uses_triton(torch.empty(0, dtype=WEIGHT_DTYPES[cfg.fabric.precision], device=device))
    require(
        cfg.rollout.n_splits is None or has_kernels,
        f"rollout.n_splits={cfg.rollout.n_splits} needs the Triton kernels, which do not run on "
        f"{device.type} with kernels={cfg.kernels}, fabric.precision={cfg.fabric.precision}; leave it null",
    )
    require(
        not cfg.rollout.compile_layers or cfg.fabric.strategy != "fsdp2",
        "rollout.compile_layers=true cannot compile sharded layers (fabric.strategy=fsdp2); leave it out",
    )
    if cfg.rollout.compile_layers:
        with as_config_errors("rollout.compile_layers"):
            check_compiler(device)
    if cfg.rollout.cuda_graph:
        require(
            cfg.fabric.strategy != "fsdp2",
            "rollout.cuda_graph=true cannot capture a decode step that gathers sharded layers "
            "(fabric.strategy=fsdp2); leave it out",
        )
        require(
            device.type == "cuda",
            f"rollout.cuda_graph=true needs CUDA, got device {device.type}; use null, which captures if "
            "possible",
        )


def _measured(cfg: Config, tokenizer: PreTrainedTokenizerBase, task: Task) -> Sizes:
    """Count tokens of prompts and solutions; refuse a max_new_tokens that would cut solutions for SFT."""
    limit = cfg.rollout.max_new_tokens
    n_rows = len(task) if isinstance(task, UserTask) else N_CHECKED
    with as_config_errors("task"), track("count tokens of row", n_rows, quiet_s=QUIET_S) as advance:
        sizes = measure(task, tokenizer, cfg.seed, needs_eval_split="eval" in cfg.stages, on_progress=advance)
    longest = max(sizes.solutions)
    if "sft" in cfg.stages and min(sizes.solutions) == 1:
        raise ConfigError(
            f"stages={show(cfg.stages)}: sft imitates worked solutions, and {task} has prompts alone; leave "
            "it out, or set task.answer_column or task.solution_column"
        )
    if "sft" in cfg.stages and task.is_verifiable and longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens={limit} cuts worked solutions, which take up to {longest} tokens "
            f"with their end; raise it to at least {longest}"
            + sizes.longest(sizes.solutions, lambda n_tokens: n_tokens > limit)
        )
    return sizes
