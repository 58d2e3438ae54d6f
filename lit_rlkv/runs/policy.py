"""Build the roles and the RL module of a run from its config."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from lit_rlkv.config import Config, ConfigError, as_config_errors, build
from lit_rlkv.experience.score import critic_sees_shadow
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import CRITICS, LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.backbone import load_backbone, shard
from lit_rlkv.runs.checkpoint import Checkpoint, load_trainable
from lit_rlkv.runs.context import RunContext
from lit_rlkv.runs.extensions import build_user_callbacks
from lit_rlkv.runs.starting_model import critic_dir, load_reward_head


def needed_roles(cfg: Config) -> set[str]:
    """Return the roles that advantage, KL, reward, distillation and callbacks need beside the policy."""
    needed = set(build(cfg.algorithm.advantage).needs)
    if cfg.reward.learned != 0:
        needed.add("reward")
    if cfg.algorithm.kl.weight > 0:
        needed.add("reference")
    if cfg.distillation is not None:
        needed |= set(build(cfg.distillation).needs)
    for callback in build_user_callbacks(cfg):
        needed |= set(getattr(callback, "needs", ()))
    return needed


def make_roles(context: RunContext, start: str | Path) -> Roles:
    """Build the backbones, adapters and heads of the layout from one starting model.

    Raises:
        ConfigError: the starting model lacks what the layout and the algorithm need.
    """
    cfg, settings = context.cfg, context.cfg.roles
    needed = needed_roles(cfg)
    critic = critic_dir(start)
    reward_head = load_reward_head(critic)
    if critic != start and LAYOUTS[settings.layout].shares_critic and needed & set(CRITICS):
        raise ConfigError(
            f"roles={settings.layout} has one backbone for policy and critics, but {start} holds a reward "
            f"model with weights of its own; use roles=dynamic_lora, or train with sft.joint=true"
        )
    if "value" in needed and settings.value_init == "reward" and reward_head is None:
        raise ConfigError(
            f"roles.value_init=reward starts the critic from the reward head, and {start} has none; use "
            "roles.value_init=zero, or train on preference pairs (stages=[sft,...], sft.n_pairs)"
        )

    def load(role: str) -> PreTrainedModel:
        backbone = load_backbone(context, critic if role in CRITICS else start)
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
        shard(context, roles.named_backbone(name))
    roles.heads.to(context.fabric.device)
    return roles


def make_policy(context: RunContext, start: str | Path) -> PolicyModule:
    """Build the RL module of the algorithm with its roles."""
    cfg, algorithm = context.cfg, context.cfg.algorithm
    n_steps = algorithm.n_iterations * algorithm.n_epochs * algorithm.n_minibatches
    # Only a KL in the loss has an estimator there; one in the reward may be k1, which has no gradient.
    in_loss = {"kl_estimator": algorithm.kl.estimator} if algorithm.kl.place == "loss" else {}
    has_critic = "value" in build(algorithm.advantage).needs
    sees_shadow = critic_sees_shadow(cfg.roles, build(cfg.correction), context.cache)
    critic = {"value_shadow": sees_shadow} if has_critic else {}
    roles = make_roles(context, start)
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


def load_policy_weights(module: PolicyModule, checkpoint: Checkpoint) -> None:
    """Load the trained parameters of a checkpoint.

    Raises:
        ConfigError: the checkpoint holds other parameters than the module trains.
    """
    with as_config_errors(str(checkpoint.path)):
        load_trainable(module, checkpoint.weights())
