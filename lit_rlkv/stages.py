"""The stages of a run, each a function of its config: warm up, train by RL, evaluate."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from lightning.fabric import Fabric
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_rlkv.callbacks.hooks import RLCallback, check_hooks
from lit_rlkv.callbacks.progress import track
from lit_rlkv.checkpoint import Checkpoint, CheckpointDir, load_trainable
from lit_rlkv.config import WEIGHT_DTYPES, ConfigError, as_config_errors, build, expanded
from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.evaluation import EvalConfig, Evaluator
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.rollouts import RolloutDataModule, SamplingConfig, UpdateConfig
from lit_rlkv.data.tasks import Task
from lit_rlkv.data.tokenizers import encode, encode_prompts, load_tokenizer
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.loop import train
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import check_length
from lit_rlkv.models.hydra import acting_as, add_policy_adapter
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.rng import derive_seed
from lit_rlkv.types import EvalRow, Rollout

WARM_FORMAT = 1
"""Raised when warm-up changes what it writes or computes, so that no older result is taken for a new one."""
WARM_DONE = "warm.json"
REWARD_HEAD = "reward_head.safetensors"
N_SEEN = 64
"""Problems looked at before work starts."""
CONFIG, BACKBONE, CHECKPOINTS = "config.yaml", "backbone", "checkpoints"
"""Where a run folder keeps them."""


@dataclass(frozen=True)
class Parts:
    """What all stages of a run share."""

    cfg: DictConfig
    fabric: Fabric
    tokenizer: PreTrainedTokenizerBase
    task: Task
    prompt_len: int
    """Tokens of the longest prompt among the first ones."""

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(**self.cfg.cache)


def build_parts(cfg: DictConfig) -> Parts:
    """Tokenizer, task and device of a run."""
    disable_progress_bar()  # transformers' own, of which every load shows one
    if cfg.fabric.n_threads is not None:
        torch.set_num_threads(cfg.fabric.n_threads)
    fabric = Fabric(
        accelerator=cfg.fabric.accelerator, devices=cfg.fabric.devices, precision=cfg.fabric.precision
    )
    with as_config_errors("model"):
        tokenizer = load_tokenizer(expanded(cfg.model.path))
    task = build(cfg.task)
    return Parts(cfg, fabric, tokenizer, task, _measured_prompt(cfg, tokenizer, task))


def _measured_prompt(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> int:
    """Tokens of the longest of the first prompts; refuses a limit that their worked solutions exceed."""
    limit = cfg.rollout.max_new_tokens
    with as_config_errors("task"):
        problems = PromptSource(task, split="train", seed=cfg.seed).take(N_SEEN)
        longest = max(len(encode(tokenizer, problem.solution)) for problem in problems) + 1
        prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    if "sft" in cfg.stages and longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens={limit} cuts worked solutions, which take up to {longest} tokens "
            f"with their end; raise it to at least {longest}"
        )
    return prompts.token_ids.shape[1]


def load_backbone(parts: Parts, path: str | Path | None) -> PreTrainedModel:
    """The backbone of a path or hub name, or the fresh preset, on the run's device and proven replayable.

    Weights are in the run's precision, not in that of the checkpoint; in float32 under mixed precision.
    """
    with as_config_errors("model"):
        return _load_backbone(parts, path, WEIGHT_DTYPES[parts.cfg.fabric.precision])


def _load_backbone(parts: Parts, path: str | Path | None, dtype: torch.dtype) -> PreTrainedModel:
    if path is not None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    else:
        torch.manual_seed(derive_seed(parts.cfg.sft.seed, "init"))
        tokenizer = parts.tokenizer
        model = build(parts.cfg.model.preset)(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
        model = model.type(dtype)
    parts.fabric.to_device(model)
    check_length(model, parts.prompt_len + parts.cfg.rollout.max_new_tokens)
    return prepare_backbone(model.eval())


def warm_folder(cfg: DictConfig) -> Path:
    """Where the warm model of this config is, or will be: named by everything that it depends on."""
    parts = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("task", "model", "sft")}
    files = [_fingerprint(cfg[name].get("path")) for name in ("task", "model")]
    text = json.dumps([WARM_FORMAT, torch.__version__, cfg.fabric.precision, parts, files], sort_keys=True)
    return Path(cfg.runs_dir) / "warm" / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _fingerprint(path: str | None) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the local files at a path, so that changed content is another warm model."""
    root = Path(path).expanduser() if path is not None else None
    if root is None or not root.exists():
        return []
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def start_folder(cfg: DictConfig, run_dir: Path) -> str | Path | None:
    """The model that RL and evaluation start from, None while it still has to be warmed up.

    A run that is resumed has its own; then, unless `stages` take `model.path` as it is, comes the warm model.

    Raises:
        ConfigError: `stages` leave out sft, and there is neither a warm model nor a `model.path`.
    """
    warm = warm_folder(cfg)
    if (run_dir / BACKBONE / WARM_DONE).is_file():
        return run_dir / BACKBONE
    if "sft" not in cfg.stages and cfg.model.path is not None:
        return expanded(cfg.model.path)
    if (warm / WARM_DONE).is_file():
        return warm
    if "sft" in cfg.stages:
        return None
    raise ConfigError(
        f"stages={list(cfg.stages)} start from a warm model, but no earlier run left one for this config "
        f"in {warm.parent}; add sft to stages, or give model.path"
    )


def warm_up(parts: Parts, callbacks: Sequence[Callback]) -> Path:
    """Hydra-SFT on worked solutions; the result is kept for the next run with this config to start from."""
    cfg = parts.cfg.sft
    backbone = load_backbone(parts, expanded(parts.cfg.model.path))
    module = HydraSFT(
        backbone,
        build(cfg.optimizer),
        reward_weight=cfg.reward_weight,
        n_steps=cfg.n_steps,
        n_warmup_steps=cfg.n_warmup_steps,
    )
    datamodule = PreferenceDataModule(
        parts.task,
        PromptSource(parts.task, split="train", seed=cfg.seed),
        parts.tokenizer,
        batch_size=cfg.batch_size,
        n_pairs=cfg.n_pairs,
        steps_per_loader=min(cfg.steps_per_iteration, cfg.n_steps),
        seed=cfg.seed,
    )
    check_hooks(callbacks)
    train(
        parts.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=cfg.n_steps // datamodule.steps_per_loader,
        max_grad_norm=cfg.max_grad_norm,
    )
    folder = warm_folder(parts.cfg)
    # Named by process: two runs may warm up the same model at once, and the first to finish stays.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    backbone.save_pretrained(partial)
    parts.tokenizer.save_pretrained(partial)
    save_file(module.reward_head.state_dict(), partial / REWARD_HEAD)
    (partial / WARM_DONE).write_text(json.dumps({"config": OmegaConf.to_container(cfg, resolve=True)}))
    if folder.exists():
        shutil.rmtree(partial)
    else:
        os.replace(partial, folder)
    return folder


def make_policy(parts: Parts, backbone: PreTrainedModel) -> PolicyModule:
    """The RL module: the backbone frozen, the policy's LoRA on it."""
    cfg = parts.cfg
    torch.manual_seed(derive_seed(cfg.seed, "lora"))
    targets = cfg.roles.target_modules
    with as_config_errors("roles"):
        add_policy_adapter(
            backbone,
            rank=cfg.roles.rank,
            alpha=cfg.roles.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
        )
    algorithm = cfg.algorithm
    n_steps = algorithm.n_iterations * algorithm.n_epochs * algorithm.n_minibatches
    make_module = build(algorithm.loss)
    with as_config_errors("algorithm.loss"):
        module: PolicyModule = make_module(
            backbone,
            build(cfg.optimizer),
            replays=cfg.correction.replays,
            temperature=cfg.rollout.temperature,
            n_decay_steps=n_steps if algorithm.lr_schedule == "linear" else None,
        )
    return module


def train_policy(
    parts: Parts,
    module: PolicyModule,
    callbacks: Sequence[RLCallback],
    checkpoints: CheckpointDir,
    resume_from: Checkpoint | None,
) -> None:
    """RL from the first iteration, or from a checkpoint."""
    cfg = parts.cfg
    algorithm = cfg.algorithm
    datamodule = RolloutDataModule(
        module.backbone,
        parts.tokenizer,
        parts.task,
        PromptSource(parts.task, split="train", seed=derive_seed(cfg.seed, "prompts", "rl")),
        parts.cache,
        build(cfg.correction),
        SamplingConfig(
            n_prompts=cfg.rollout.n_prompts,
            group_size=algorithm.group_size,
            max_new_tokens=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature,
        ),
        UpdateConfig(
            advantage=algorithm.advantage,
            aggregation=algorithm.aggregation,
            n_epochs=algorithm.n_epochs,
            n_minibatches=algorithm.n_minibatches,
            n_micro_batches=algorithm.n_micro_batches,
            drop_uniform_groups=algorithm.drop_uniform_groups,
            needs_reference=algorithm.loss.get("kl_weight", 0.0) > 0,
        ),
        seed=cfg.seed,
        on_rollout_end=[callback.on_rollout_end for callback in callbacks],
    )
    module.loss_terms = [callback.loss_terms for callback in callbacks]
    check_hooks(callbacks)
    if resume_from is not None:
        load_trainable(module, resume_from.weights())
        datamodule.load_state_dict(resume_from.data_state)

    def save(iteration: int, optimizer_state: dict[str, Any]) -> None:
        if iteration % cfg.callbacks.checkpoint_every == 0 or iteration == algorithm.n_iterations:
            checkpoints.save(
                iteration, module.trainable_state_dict(), optimizer_state, datamodule.state_dict()
            )

    train(
        parts.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=algorithm.n_iterations,
        first_iteration=0 if resume_from is None else resume_from.iteration,
        optimizer_state=None if resume_from is None else resume_from.optimizer_state(),
        max_grad_norm=algorithm.max_grad_norm,
        save=save,
    )


def evaluation_caches(parts: Parts) -> list[CacheSpec]:
    """Dense, then the run's cache at each budget asked for, the one of the rollouts among them."""
    spec = parts.cache
    if spec.is_dense:
        return [spec]
    budgets = sorted({*parts.cfg.evaluation.budgets, spec.budget}, reverse=True)
    sparse = [CacheSpec(**{**parts.cfg.cache, "budget": budget}) for budget in budgets]
    return [CacheSpec.dense(), *sparse]


def evaluate_policy(parts: Parts, backbone: PreTrainedModel, role: str) -> tuple[list[EvalRow], Rollout]:
    """Accuracy on held-out prompts with each cache, and the rollout under the run's own budget."""
    cfg = parts.cfg.evaluation
    source = PromptSource(parts.task, split="eval", seed=parts.cfg.seed)
    problems = source.take(min(cfg.n_prompts, source.size or cfg.n_prompts))
    config = EvalConfig(
        max_new_tokens=parts.cfg.rollout.max_new_tokens,
        temperature=cfg.temperature,
        sampling_temperature=parts.cfg.rollout.temperature,
        n_mismatch=cfg.n_mismatch,
        batch_size=cfg.batch_size,
        seed=parts.cfg.seed,
    )
    evaluator = Evaluator(backbone, parts.tokenizer, parts.task, problems, config)
    caches = evaluation_caches(parts)
    rows, pictured = [], None
    with track("eval", len(caches)) as advance, acting_as(backbone, role), parts.fabric.autocast():
        for cache in caches:
            row, rollout = evaluator.score_cache(cache)
            rows.append(row)
            advance(accuracy=row.accuracy)
            if cache == parts.cache or pictured is None:
                pictured = rollout
    assert pictured is not None
    return rows, pictured
