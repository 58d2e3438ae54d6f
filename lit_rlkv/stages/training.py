"""RL: the policy's module, its data, and the loop."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import RLCallback, check_hooks
from lit_rlkv.checkpoint import Checkpoint, CheckpointDir, load_trainable
from lit_rlkv.config import as_config_errors, build
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.rollouts import RolloutDataModule, SamplingConfig, UpdateConfig
from lit_rlkv.loop import train
from lit_rlkv.models.hydra import add_policy_adapter
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.rng import derive_seed
from lit_rlkv.stages.parts import Parts


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
