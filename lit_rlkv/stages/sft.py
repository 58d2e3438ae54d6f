"""The warm model that RL starts from, made by supervised fine-tuning once and kept for every later run."""

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning import Callback
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.config import as_config_errors, build, expanded
from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.validation import check_completions_fit
from lit_rlkv.distributed.ranks import ranks_of
from lit_rlkv.faults import Interruption
from lit_rlkv.files import atomic_dir, link_tree
from lit_rlkv.models.backbone import check_length, text_config
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.reporting.metrics_file import MetricsFile
from lit_rlkv.reporting.progress import ProgressBar
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.checkpoint import load_trainable
from lit_rlkv.runs.context import RunContext, load_backbone
from lit_rlkv.runs.saver import REWARD_MODEL
from lit_rlkv.runs.sft_progress import SFTProgress
from lit_rlkv.runs.shard_backbone import shard
from lit_rlkv.runs.starting_model import SFT_DONE, load_reward_head, sft_model_dir
from lit_rlkv.runs.training_run import TrainingRun
from lit_rlkv.stages.on_policy_pairs import on_policy_preference_pairs
from lit_rlkv.tasks import Task
from lit_rlkv.trainer import train

SFT_WORK = "sft"
"""Folder in a run for the checkpoints of its SFT stage."""


def make_starting_model(run: TrainingRun, start: str | Path | None) -> str | Path:
    """Return the model that RL and evaluation start from; train it by SFT where there is none yet."""
    if start is None:
        run.console.print("[bold]sft[/] supervised fine-tuning (its model is kept for later runs)")
        with run.timed("sft"):
            every = run.context.cfg.callbacks.checkpoint_every
            progress = SFTProgress(run.context.fabric, run.run_dir / SFT_WORK, every)
            callbacks = [
                ProgressBar("sft", run.console),
                MetricsFile(run.own_dir / "sft_metrics.csv", progress.resumed_at),
            ]
            start = run_sft(run.context, callbacks, progress, run.interruption)
    else:
        run.console.print(f"start from {start}")
    run.keep_backbone(Path(start))
    return start


@dataclass(frozen=True)
class Pass:
    """One pass of training over all weights of the backbone."""

    lm_weight: float | int
    reward_weight: float | int
    n_steps: int
    batch_size: int
    n_pairs: int
    seed: int
    """Of the problems and of what is wrong in rejected completions."""
    folder: str = "."
    """Of the warm model, which what it trained is saved in."""
    n_mistakes_of: int = 0
    """Prompts that the model answers first; its wrong answers are the rejected sides. 0 takes the task's."""


def training_passes(cfg: DictConfig) -> list[Pass]:
    """What `sft` asks for: the LM head with or without the reward head; then perhaps a reward model alone."""
    is_shared = cfg.joint and cfg.n_pairs > 0 and cfg.reward_weight > 0
    first = Pass(
        lm_weight=1.0,
        reward_weight=cfg.reward_weight if is_shared else 0.0,
        n_steps=cfg.n_steps,
        batch_size=cfg.batch_size,
        n_pairs=cfg.n_pairs if is_shared else 0,
        seed=cfg.seed,
    )
    passes = [first]
    if not cfg.joint:
        seed = derive_seed(cfg.seed, "prompts", "reward")
        passes.append(Pass(0.0, 1.0, cfg.reward_steps, cfg.n_pairs, cfg.n_pairs, seed, REWARD_MODEL))
    mistakes = cfg.on_policy_pairs
    if mistakes.n_prompts > 0:
        last = Pass(
            lm_weight=1.0 if cfg.joint else 0.0,
            reward_weight=mistakes.reward_weight,
            n_steps=mistakes.n_steps,
            batch_size=cfg.batch_size,
            n_pairs=cfg.batch_size,
            seed=derive_seed(cfg.seed, "prompts", "mistakes"),
            folder="." if cfg.joint else REWARD_MODEL,
            n_mistakes_of=mistakes.n_prompts,
        )
        passes.append(last)
    return passes


def run_sft(
    parts: RunContext,
    callbacks: Sequence[Callback],
    progress: SFTProgress | None = None,
    interruption: Interruption | None = None,
) -> Path:
    """Hydra-SFT on worked solutions; the result is kept for the next run with this config to start from.

    The folder holds backbone and tokenizer, and `REWARD_HEAD` if that head was trained with the LM head. A
    reward model trained apart, which starts as the finished LM, has backbone and head in `REWARD_MODEL`.

    Args:
        progress: goes on where an earlier process was cut short; None begins, and keeps nothing if it fails.
        interruption: of a run that may be asked to end.

    Raises:
        ConfigError: the task's solutions or pairs cannot be learned from, or are others than those that an
            earlier process has trained on; said before any training.
        InterruptedRunError: it was asked to end; its state is saved.
    """
    check_hooks(callbacks)
    folder = sft_model_dir(parts.cfg)
    if progress is not None:
        SFTStage(parts, callbacks, progress, interruption).go(folder)
        gc.collect()  # sharded modules are cycles, and their device is needed next
        return folder
    own = SFTProgress(parts.fabric, folder.with_name(f".{folder.name}.{os.getpid()}.work"), every=None)
    try:
        SFTStage(parts, callbacks, own, interruption).go(folder)
    finally:
        own.clear()
    return folder


class SFTStage:
    """The passes of a warm-up, from where its progress is."""

    def __init__(
        self,
        parts: RunContext,
        callbacks: Sequence[Callback],
        progress: SFTProgress,
        interruption: Interruption | None,
    ) -> None:
        self.parts = parts
        self.callbacks = callbacks
        self.progress = progress
        self.interruption = interruption
        self.passes = training_passes(parts.cfg.sft)

    def go(self, folder: Path) -> None:
        """All passes; their models are put together in a folder, which appears whole."""
        progress = self.progress
        first = progress.number
        is_begun = first > 0
        source = progress.output(first - 1) if is_begun else expanded(self.parts.cfg.model.path)
        backbone = load_backbone(self.parts, source)
        _check_data(self.parts, backbone, self.passes)
        shard(self.parts, backbone)
        head = _head_of(progress.output(first - 1), backbone) if is_begun else None
        # A reward model of its own goes on training in place, once the LM's weights are on the disk.
        for number in range(first, len(self.passes)):
            head = self._train(number, backbone, head)
            progress.finish(number, backbone, head)
        if self.parts.fabric.is_global_zero:
            self._publish(folder)
        self.parts.fabric.barrier()
        progress.clear()

    def _train(self, number: int, backbone: PreTrainedModel, head: ScalarHead | None) -> ScalarHead | None:
        """The reward head that a pass has trained, beside the backbone."""
        parts, stage, cfg = self.parts, self.passes[number], self.parts.cfg.sft
        task = parts.task
        if stage.n_mistakes_of > 0:
            task = on_policy_preference_pairs(parts, backbone, stage.n_mistakes_of, stage.seed)
        module = HydraSFT(
            backbone,
            build(cfg.optimizer),
            lm_weight=stage.lm_weight,
            reward_weight=stage.reward_weight,
            n_steps=stage.n_steps,
            n_warmup_steps=cfg.n_warmup_steps,
            reward_head=head,
        )
        datamodule = _data(parts, stage, task)
        lengths = [one.n_steps // min(cfg.steps_per_iteration, one.n_steps) for one in self.passes]
        begin, end = sum(lengths[:number]), sum(lengths[: number + 1])
        resumed = self.progress.resumed if number == self.progress.number else None
        if resumed is not None:
            load_trainable(module, resumed.weights())
            with as_config_errors(str(resumed.path)):
                datamodule.load_state_dict(resumed.data_state["data"])
        train(
            parts.fabric,
            module,
            datamodule,
            callbacks=self.callbacks,
            first_iteration=begin if resumed is None else resumed.iteration,
            n_iterations=end,
            learner_state=None if resumed is None else resumed.learner_state(),
            max_grad_norm=cfg.max_grad_norm,
            save=self.progress.saver(module, number, end),
            learning=lambda: explain_out_of_memory(
                lambda: (
                    f"out of memory in warm-up; lower sft.batch_size={cfg.batch_size} or "
                    f"sft.n_pairs={cfg.n_pairs}, which make up its batches"
                )
            ),
            interruption=self.interruption,
        )
        return module.reward_head

    def _publish(self, folder: Path) -> None:
        """Put the warm model where runs look for it, unless another run has been faster."""
        with atomic_dir(folder, replaces=False) as partial:
            for number, stage in enumerate(self.passes):
                link_tree(self.progress.output(number), partial / stage.folder)
            self.parts.tokenizer.save_pretrained(partial)
            config = OmegaConf.to_container(self.parts.cfg.sft, resolve=True)
            (partial / SFT_DONE).write_text(json.dumps({"config": config}))


def _head_of(folder: Path, backbone: PreTrainedModel) -> ScalarHead | None:
    weights = load_reward_head(folder)
    if weights is None:
        return None
    head = ScalarHead(text_config(backbone).hidden_size)
    head.load_state_dict(weights)
    return head


def _check_data(parts: RunContext, backbone: PreTrainedModel, passes: Sequence[Pass]) -> None:
    """Measure all rows and make a batch of each pass: what is wrong with the data is said before any work."""
    with as_config_errors("task"):
        check_completions_fit(backbone, parts.sizes, has_pairs=any(stage.n_pairs > 0 for stage in passes))
        for stage in passes:
            batch = _data(parts, stage, parts.task).next_batch()
            sides = [batch.chosen, *([] if batch.rejected is None else [batch.rejected])]
            check_length(backbone, max(side.n_tokens for side in sides))


def _data(parts: RunContext, stage: Pass, task: Task) -> PreferenceDataModule:
    ranks = ranks_of(parts.fabric)
    return PreferenceDataModule(
        task,
        PromptSource(task, split="train", seed=stage.seed, rank=ranks.rank, world_size=ranks.size),
        parts.tokenizer,
        batch_size=stage.batch_size,
        n_pairs=stage.n_pairs,
        steps_per_loader=min(parts.cfg.sft.steps_per_iteration, stage.n_steps),
        seed=stage.seed,
        ranks=ranks,
    )
