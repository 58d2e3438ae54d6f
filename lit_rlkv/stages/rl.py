"""The RL stage: the rollout data, the policy, the training loop."""

from collections.abc import Sequence

from lightning import Callback

from lit_rlkv.callbacks.hooks import bound_hooks, check_hooks, loss_terms_of
from lit_rlkv.config import as_config_errors, build
from lit_rlkv.config.rewards import build_reward
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.distributed.ranks import ranks_of
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.experience.settings import KLConfig, SamplingConfig, UpdateConfig
from lit_rlkv.faults import Interruption
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir
from lit_rlkv.runs.context import RunContext
from lit_rlkv.runs.policy import load_policy_weights, value_shadow
from lit_rlkv.runs.saver import Saver
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
        TypeError: a callback has a hook that the loop never calls.
        ConfigError: the checkpoint holds other parameters, or the data has changed since it was written.
    """
    check_hooks(callbacks)
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
            rank=ranks.rank,
            world_size=ranks.size,
        ),
        context.cache,
        build(cfg.correction),
        build(algorithm.advantage),
        SamplingConfig(
            n_prompts=cfg.rollout.n_prompts,
            group_size=algorithm.group_size,
            max_new_tokens=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature,
            max_rows=cfg.rollout.max_rows,
            cuda_graph=cfg.rollout.cuda_graph,
            rows_per_pass=cfg.rollout.rows_per_pass,
            stacks_passes=cfg.roles.stack_passes,
            value_shadow=value_shadow(context),
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
        rewards=context.rewards,
        on_rollout_end=bound_hooks(callbacks, "on_rollout_end"),
        on_update_start=bound_hooks(callbacks, "on_update_start"),
        on_phase_start=bound_hooks(callbacks, "on_phase_start"),
        on_phase_end=bound_hooks(callbacks, "on_phase_end"),
        ranks=ranks,
    )
    module.loss_terms = loss_terms_of(callbacks)
    if resume_from is not None:
        load_policy_weights(module, resume_from)
        with as_config_errors(str(resume_from.path)):
            datamodule.load_state_dict(resume_from.data_state)

    train(
        context.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=algorithm.n_iterations,
        first_iteration=0 if resume_from is None else resume_from.iteration,
        learner_state=None if resume_from is None else resume_from.learner_state(),
        max_grad_norm=algorithm.max_grad_norm,
        save=Saver(
            context.fabric,
            module,
            checkpoints,
            cfg.callbacks.checkpoint_every,
            saved_at=None if resume_from is None else resume_from.iteration,
            backbone=backbone,
        ),
        update_context=lambda: explain_out_of_memory(datamodule.explain_update),
        interruption=interruption,
    )
