"""The RL stage: the rollout data, the policy, the training loop."""

from collections.abc import Sequence

from lightning import Callback

from lit_rlkv.callbacks.diagnostic import RowsDiagnostic
from lit_rlkv.callbacks.hooks import loss_terms_of
from lit_rlkv.callbacks.mismatch import DenseMismatch
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.runs.memory import choose_checkpoints, passes_of, tokens_per_pass
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.saver import CheckpointSaver
from lit_rlkv.runs.starting_model import source_ids
from lit_rlkv.trainer import train


def train_policy(
    run: Run, module: PolicyModule, callbacks: Sequence[Callback], backbone: str | None = None
) -> None:
    """Train the policy by RL, from the first iteration or from the run's checkpoint.

    Args:
        backbone: fingerprint of the frozen weights, kept in each checkpoint.

    Raises:
        ConfigError: the checkpoint holds other parameters, or the data has changed since.
    """
    cfg = run.cfg
    roles = module.roles
    passes = passes_of(run, roles)
    roles.keep_for_backward(choose_checkpoints(run, passes))
    n_tokens = tokens_per_pass(run, passes, roles.checkpoints_layers)
    datamodule = RolloutDataModule(run, module, callbacks, n_tokens)
    datamodule.sources = source_ids(cfg)
    for callback in callbacks:
        if isinstance(callback, RowsDiagnostic):
            callback.tokens_per_pass = min(callback.tokens_per_pass, n_tokens)
        if isinstance(callback, DenseMismatch):
            callback.budget = datamodule.budget
    module.loss_terms = loss_terms_of(callbacks)
    every = cfg.callbacks.checkpoint_every
    saver = CheckpointSaver(
        run.fabric, module, run.checkpoints, every, run.resume_from, backbone, module.roles
    )
    train(
        run.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=cfg.algorithm.n_iterations,
        first_iteration=run.resumed_at,
        learner_state=saver.load(datamodule),
        max_grad_norm=cfg.algorithm.max_grad_norm,
        save=saver.save,
        update_context=lambda: explain_out_of_memory(datamodule.explain_update, datamodule.tokens_at_once),
        interruption=run.interruption,
    )
