"""RL: the policy's module, its data, and the loop."""

from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import RLCallback, check_hooks, loss_terms_of
from lit_rlkv.checkpoint import Checkpoint, CheckpointDir, load_trainable
from lit_rlkv.config import ConfigError, as_config_errors, build, build_reward
from lit_rlkv.data.phases import Phases
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.rollouts import RolloutDataModule
from lit_rlkv.data.settings import KLConfig, SamplingConfig, UpdateConfig
from lit_rlkv.faults import Interruption
from lit_rlkv.loop import train
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import CRITICS, LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.out_of_memory import explaining_memory
from lit_rlkv.ranks import ranks_of
from lit_rlkv.rng import derive_seed
from lit_rlkv.stages.parts import Parts, load_backbone
from lit_rlkv.stages.saving import Saver
from lit_rlkv.stages.sharding import shard
from lit_rlkv.stages.warmup import critic_folder, load_reward_head


def needed_roles(cfg: DictConfig) -> set[str]:
    """The roles that the algorithm, its KL, the reward and the distillation ask for, beside the policy."""
    needed = set(build(cfg.algorithm.credit).needs)
    if cfg.reward.learned != 0:
        needed.add("reward")
    if cfg.algorithm.kl.weight > 0:
        needed.add("reference")
    if cfg.distillation is not None:
        needed |= set(build(cfg.distillation).needs)
    return needed


def make_roles(parts: Parts, start: str | Path) -> Roles:
    """The backbones, adapters and heads of the layout, all from one warm model.

    Raises:
        ConfigError: the warm model lacks what the layout and the algorithm need.
    """
    cfg, settings = parts.cfg, parts.cfg.roles
    needed = needed_roles(cfg)
    critic = critic_folder(start)
    reward_head = load_reward_head(critic)
    if critic != start and LAYOUTS[settings.layout].shares_critic and needed & set(CRITICS):
        raise ConfigError(
            f"roles={settings.layout} has one backbone for policy and critics, but {start} holds a reward "
            f"model with weights of its own; use roles=dynamic_lora, or warm up with sft.joint=true"
        )
    if "value" in needed and settings.value_init == "reward" and reward_head is None:
        raise ConfigError(
            f"roles.value_init=reward starts the critic from the reward head, and {start} has none; use "
            "roles.value_init=zero, or warm up with preference pairs (stages=[sft,...], sft.n_pairs)"
        )

    def load(role: str) -> PreTrainedModel:
        backbone = load_backbone(parts, critic if role in CRITICS else start)
        torch.manual_seed(derive_seed(cfg.seed, "lora"))  # the adapters come next, whatever loading drew
        return backbone

    targets = settings.target_modules
    with as_config_errors("roles"):
        roles = Roles(
            settings.layout,
            load,
            lora=LoraSpec(
                settings.rank, settings.alpha, targets if isinstance(targets, str) else list(targets)
            ),
            needed=needed,
            reward_head=reward_head,
            value_head=reward_head if settings.value_init == "reward" else None,
            checkpoints_layers=settings.gradient_checkpointing,
        )
    for name in roles.backbones:
        shard(parts, roles.named_backbone(name))
    roles.heads.to(parts.fabric.device)
    return roles


def make_policy(parts: Parts, start: str | Path) -> PolicyModule:
    """The RL module of the algorithm."""
    cfg, algorithm = parts.cfg, parts.cfg.algorithm
    n_steps = algorithm.n_iterations * algorithm.n_epochs * algorithm.n_minibatches
    # Only a KL in the loss has an estimator there; one in the reward may be k1, which has no gradient.
    in_loss = {"kl_estimator": algorithm.kl.estimator} if algorithm.kl.place == "loss" else {}
    critic = {"value_shadow": value_shadow(parts)} if has_critic(cfg) else {}
    roles = make_roles(parts, start)
    make_module = build(algorithm.loss)
    with as_config_errors("algorithm.loss"):
        module: PolicyModule = make_module(
            roles,
            build(cfg.optimizer),
            replays=cfg.correction.replays,
            temperature=cfg.rollout.temperature,
            policy_weight=algorithm.policy_weight,
            n_warmup_steps=algorithm.n_warmup_steps,
            n_decay_steps=n_steps if algorithm.lr_schedule == "linear" else None,
            **in_loss,
            **critic,
        )
    return module


def has_critic(cfg: DictConfig) -> bool:
    """Whether the algorithm's credit needs values."""
    return "value" in build(cfg.algorithm.credit).needs


def value_shadow(parts: Parts) -> bool:
    """Whether the critic sees what the sampler saw; where nothing is evicted, it takes the policy's view."""
    correction = parts.cfg.correction
    if correction.samples_dense or parts.cache.is_dense:
        return bool(correction.replays)
    return bool(parts.cfg.roles.value_view == "shadow")


def train_policy(
    parts: Parts,
    module: PolicyModule,
    callbacks: Sequence[RLCallback],
    checkpoints: CheckpointDir,
    resume_from: Checkpoint | None,
    interruption: Interruption | None = None,
    backbone: str | None = None,
) -> None:
    """RL from the first iteration, or from a checkpoint; `backbone` is the fingerprint of what is frozen.

    Raises:
        TypeError: a callback that the loop cannot call.
        ConfigError: the checkpoint is of other parameters, or of other rows than the data has now.
    """
    check_hooks(callbacks, RLCallback)
    cfg = parts.cfg
    algorithm = cfg.algorithm
    ranks = ranks_of(parts.fabric)
    datamodule = RolloutDataModule(
        module.roles,
        parts.tokenizer,
        parts.task,
        PromptSource(
            parts.task,
            split="train",
            seed=derive_seed(cfg.seed, "prompts", "rl"),
            rank=ranks.rank,
            world_size=ranks.size,
        ),
        parts.cache,
        build(cfg.correction),
        build(algorithm.credit),
        SamplingConfig(
            n_prompts=cfg.rollout.n_prompts,
            group_size=algorithm.group_size,
            max_new_tokens=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature,
            max_rows=cfg.rollout.max_rows,
            cuda_graph=cfg.rollout.cuda_graph,
            rows_per_pass=cfg.rollout.rows_per_pass,
            stacks_passes=cfg.roles.stack_passes,
            value_shadow=value_shadow(parts),
            n_shards=cfg.rollout.n_shards,
        ),
        UpdateConfig(
            aggregation=algorithm.aggregation,
            n_epochs=algorithm.n_epochs,
            n_minibatches=algorithm.n_minibatches,
            n_micro_batches=algorithm.n_micro_batches,
            mask_truncated=algorithm.mask_truncated,
            learner_parts=module.learner_parts,
            critic_warmup=algorithm.critic_warmup,
            warmup_part=module.warmup_part,
        ),
        seed=cfg.seed,
        kl=KLConfig(**algorithm.kl),
        reward=build_reward(cfg.reward),
        panel=parts.panel,
        on_rollout_end=[callback.on_rollout_end for callback in callbacks],
        on_update_start=[callback.on_update_start for callback in callbacks],
        phases=Phases(
            [callback.on_phase_start for callback in callbacks],
            [callback.on_phase_end for callback in callbacks],
        ),
        ranks=ranks,
    )
    module.loss_terms = loss_terms_of(callbacks)
    if resume_from is not None:
        with as_config_errors(str(resume_from.path)):
            load_trainable(module, resume_from.weights())
            datamodule.load_state_dict(resume_from.data_state)

    train(
        parts.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=algorithm.n_iterations,
        first_iteration=0 if resume_from is None else resume_from.iteration,
        learner_state=None if resume_from is None else resume_from.learner_state(),
        max_grad_norm=algorithm.max_grad_norm,
        save=Saver(
            parts.fabric,
            module,
            checkpoints,
            cfg.callbacks.checkpoint_every,
            saved_at=None if resume_from is None else resume_from.iteration,
            backbone=backbone,
        ),
        learning=lambda: explaining_memory(datamodule.explain_update),
        interruption=interruption,
    )
