"""What all stages share: tokenizer, task, device, and how a backbone is loaded."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric import Fabric
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_rlkv.config import WEIGHT_DTYPES, ConfigError, as_config_errors, build, build_reward, expanded
from lit_rlkv.data.tokenizers import check_vocabulary, load_tokenizer
from lit_rlkv.data.validation import Sizes, check_prompts_fit, measure
from lit_rlkv.distributed.sharding import ShardedStrategy
from lit_rlkv.evaluation.correctness import Accuracy, accuracy_of
from lit_rlkv.kernels.backend import set_kernels, uses_triton, using
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.adapters import check_target_modules
from lit_rlkv.models.backbone import n_embedded
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.loading import load_causal_lm
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.rewards import RewardManager
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.launch import fabric_precision
from lit_rlkv.tasks import Task

CONFIG, BACKBONE, CHECKPOINTS = "config.yaml", "backbone", "checkpoints"
EVALUATION, METRICS, REPORT = "evaluation.json", "metrics.csv", "report.html"
"""Where a run folder keeps them; the report is the last that a run writes."""


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    cfg: DictConfig
    fabric: Fabric
    tokenizer: PreTrainedTokenizerBase
    task: Task
    sizes: Sizes
    """Of the task's texts, all or the first ones."""
    rewards: RewardManager
    """The reward functions, which start when they are first asked."""

    @property
    def is_sharded(self) -> bool:
        """Whether the layers of backbones lie in shards on the ranks."""
        return isinstance(self.fabric.strategy, ShardedStrategy)

    @property
    def cache(self) -> CacheSpec:
        """The config's; training samples from a dense one where the correction says so."""
        return CacheSpec(**self.cfg.cache)

    @property
    def accuracy(self) -> Accuracy:
        """What evaluations call right."""
        reward = self.cfg.reward
        return accuracy_of(self.task, self.rewards, reward.accuracy)


def load_config(run_dir: Path) -> DictConfig:
    """The config of an earlier run."""
    saved = OmegaConf.load(run_dir / CONFIG)
    assert isinstance(saved, DictConfig)
    return saved


def build_context(cfg: DictConfig, fabric: Fabric | None = None) -> RunContext:
    """Tokenizer, task and device of a run, alone on its device where no fabric is given."""
    disable_progress_bar()  # transformers' own, of which every load shows one
    if cfg.fabric.n_threads is not None:
        torch.set_num_threads(cfg.fabric.n_threads)
    set_kernels(cfg.kernels)
    precision = fabric_precision(cfg.fabric.precision)
    fabric = fabric or Fabric(accelerator=cfg.fabric.accelerator, devices=1, precision=precision)
    _check_device(cfg, fabric.device)
    with as_config_errors("model"):
        tokenizer = load_tokenizer(expanded(cfg.model.path))
    task = build(cfg.task)
    rewards = RewardManager(build_reward(cfg.reward).functions)
    return RunContext(cfg, fabric, tokenizer, task, _measured(cfg, tokenizer, task), rewards)


def _check_device(cfg: DictConfig, device: torch.device) -> None:
    """Refuse what this device cannot do, before there is a model to try it on."""
    with as_config_errors("kernels"):
        uses_triton(torch.empty(0, dtype=WEIGHT_DTYPES[cfg.fabric.precision], device=device))
    if cfg.rollout.cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"rollout.cuda_graph=true needs CUDA, and this run is on {device.type}; use null, which captures "
            "where it can"
        )


def _measured(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> Sizes:
    """Tokens of prompts and worked solutions; refuses a limit that solutions to learn from exceed."""
    limit = cfg.rollout.max_new_tokens
    with as_config_errors("task"):
        sizes = measure(task, tokenizer, cfg.seed, holds_out="eval" in cfg.stages)
    longest = max(sizes.solutions)
    if "sft" in cfg.stages and min(sizes.solutions) == 1:
        raise ConfigError(
            f"stages={list(cfg.stages)}: sft imitates worked solutions, and {task} has prompts alone; leave "
            "it out, or set task.answer_column or task.solution_column"
        )
    if "sft" in cfg.stages and task.is_verifiable and longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens={limit} cuts worked solutions, which take up to {longest} tokens "
            f"with their end; raise it to at least {longest}"
            + sizes.named(sizes.solutions, lambda n_tokens: n_tokens > limit)
        )
    return sizes


def load_backbone(parts: RunContext, path: str | Path | None) -> PreTrainedModel:
    """The backbone of a path or hub name, or the fresh preset, proven replayable: on the run's device, or on
    the CPU where it is still to be sharded.

    Weights are in the run's precision, not in that of the checkpoint; in float32 under mixed precision.
    """
    with as_config_errors("model"):
        backbone = _load_backbone(parts, path, WEIGHT_DTYPES[parts.cfg.fabric.precision])
    roles = parts.cfg.roles
    if not LAYOUTS[roles.layout].trains_backbones:
        with as_config_errors("roles"):
            check_target_modules(backbone, roles.target_modules)
    return backbone


def _load_backbone(parts: RunContext, path: str | Path | None, dtype: torch.dtype) -> PreTrainedModel:
    quantization = None if path is None else parts.cfg.fabric.quantization
    if path is not None:
        model = load_causal_lm(path, dtype, quantization=quantization, device=parts.fabric.device)
    else:
        torch.manual_seed(derive_seed(parts.cfg.sft.seed, "init"))
        tokenizer = parts.tokenizer
        model = build(parts.cfg.model.preset)(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
        for parameter in model.parameters():  # buffers, such as rotary frequencies, are as they are
            parameter.data = parameter.data.to(dtype)
    # What is quantized is where it was loaded to, and what will be sharded need not fit there.
    if quantization is None and not parts.is_sharded:
        with explain_out_of_memory(
            lambda: (
                f"out of memory while {path or 'the model'} moves to {parts.fabric.device}; shard it over "
                "several devices (fabric.strategy=fsdp2, of lit_rlkv.fit), or store less of it "
                "(fabric.precision=bf16-true, fabric.quantization=4bit)"
            )
        ):
            parts.fabric.to_device(model)
    check_vocabulary(parts.tokenizer, n_embedded(model))
    check_prompts_fit(model, parts.sizes, parts.cfg.rollout.max_new_tokens)
    with using("reference") if parts.is_sharded else nullcontext():
        return prepare_backbone(model.eval())
