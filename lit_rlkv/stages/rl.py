"""The RL stage: the rollout data, the policy, the training loop."""

from collections.abc import Sequence

from lightning import Callback

from lit_rlkv.callbacks.diagnostic import RowsDiagnostic
from lit_rlkv.callbacks.hooks import loss_terms_of
from lit_rlkv.callbacks.mismatch import DenseMismatch
from lit_rlkv.callbacks.shadow_distillation import ShadowDistillation
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.distributed.ranks import ranks_of
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.interrupts import Interruption
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir, RunState
from lit_rlkv.runs.context import RunContext
from lit_rlkv.runs.pass_size import tokens_per_pass
from lit_rlkv.runs.starting_model import source_ids
from lit_rlkv.trainer import train


def train_policy(
    context: RunContext,
    module: PolicyModule,
    callbacks: Sequence[Callback],
    checkpoints: CheckpointDir,
    resume_from: Checkpoint | None,
    interruption: Interruption | None = None,
    backbone: str | None = None,
) -> None:
    """Train the policy by RL, from the first iteration or from a checkpoint.

    Args:
        backbone: fingerprint of the frozen weights, kept in each checkpoint.

    Raises:
        ConfigError: the checkpoint holds other parameters, or the data has changed since.
    """
    cfg = context.cfg
    algorithm = cfg.algorithm
    ranks = ranks_of(context.fabric)
    datamodule = RolloutDataModule(
        module.roles,
        context.tokenizer,
        context.task,
        PromptSource(
            context.task,
            split="train",
            seed=derive_seed(cfg.seed, "prompts", "rl"),
            curriculum=algorithm.curriculum,
        ),
        cfg.parts.cache,
        cfg.parts.correction,
        cfg.parts.advantage,
        cfg.rollout,
        algorithm,
        seed=cfg.seed,
        roles_config=cfg.roles,
        reward=cfg.reward,
        learner_parts=module.learner_parts,
        warmup_part=module.warmup_part,
        rewards=context.rewards,
        environments=context.environments,
        callbacks=callbacks,
        ranks=ranks,
        tokens_per_pass=tokens_per_pass(
            context,
            module,
            module.roles.backbone("policy"),
            # Distillation adds a forward of the policy under the other view; a teacher's keeps nothing.
            n_graphs=module.n_graphs + isinstance(cfg.parts.distillation, ShadowDistillation),
        ),
        target_overlap=cfg.cache.target_overlap,
        budget_bounds=cfg.cache.budget_bounds,
        trains_evictions=module.evictions is not None,
    )
    datamodule.sources = source_ids(cfg)
    for callback in callbacks:
        if isinstance(callback, RowsDiagnostic):
            callback.tokens_per_pass = min(callback.tokens_per_pass, datamodule.tokens_per_pass)
        if isinstance(callback, DenseMismatch):
            callback.budget = datamodule.budget
    module.loss_terms = loss_terms_of(callbacks)
    state = RunState(
        context.fabric,
        module,
        checkpoints,
        cfg.callbacks.checkpoint_every,
        resume_from,
        backbone,
        module.roles,
    )
    train(
        context.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=algorithm.n_iterations,
        first_iteration=0 if resume_from is None else resume_from.iteration,
        learner_state=state.load(datamodule),
        max_grad_norm=algorithm.max_grad_norm,
        save=state.save,
        update_context=lambda: explain_out_of_memory(datamodule.explain_update, datamodule.tokens_at_once),
        interruption=interruption,
    )
