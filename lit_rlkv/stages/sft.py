"""The SFT stage (Hydra-SFT): train LM head and reward head, and save the model for later runs."""

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lightning import Callback
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.config import ConfigError, as_config_errors, build, expanded
from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import check_encodable, decode_completions, encode_prompts
from lit_rlkv.data.validation import check_completions_fit
from lit_rlkv.distributed.ranks import ranks_of
from lit_rlkv.experience.sample import sample_responses
from lit_rlkv.files import atomic_dir, link_tree
from lit_rlkv.models.backbone import check_length, text_config
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.reporting.progress import ProgressBar, track
from lit_rlkv.reporting.run_metrics import MetricsFile
from lit_rlkv.rng import derive_seed, stream
from lit_rlkv.runs.checkpoint import load_trainable
from lit_rlkv.runs.context import RunContext
from lit_rlkv.runs.policy import load_backbone, shard
from lit_rlkv.runs.sft_progress import SFTPass, SFTProgress, training_passes
from lit_rlkv.runs.signals import Interruption
from lit_rlkv.runs.starting_model import SFT_DONE, load_reward_head, sft_model_dir
from lit_rlkv.runs.training_run import TrainingRun
from lit_rlkv.tasks import Task
from lit_rlkv.tasks.preferences import Preferences
from lit_rlkv.tasks.rows import Table
from lit_rlkv.trainer import train
from lit_rlkv.types import PreferencePair, Problem

SFT_WORK = "sft"
"""Folder in a run for the checkpoints of its SFT stage."""


def make_starting_model(run: TrainingRun, start: str | Path | None) -> str | Path:
    """Return the model that RL and evaluation start from; train it by SFT if there is none yet."""
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


def run_sft(
    context: RunContext,
    callbacks: Sequence[Callback],
    progress: SFTProgress | None = None,
    interruption: Interruption | None = None,
) -> Path:
    """Train on worked solutions and preference pairs, and return the folder of the SFT model.

    The folder holds backbone and tokenizer, and `REWARD_HEAD` if the reward head was trained with the LM
    head. A separate reward model, which starts from the finished LM, has its own folder `REWARD_MODEL`.

    Args:
        progress: progress to resume; None starts from scratch and saves no checkpoints.

    Raises:
        ConfigError: the model cannot learn from the task's solutions or pairs, or they have changed since an
            earlier process trained on them; raised before any training.
        InterruptedRunError: a signal ended the run; its state is saved.
    """
    check_hooks(callbacks)
    folder = sft_model_dir(context.cfg)
    if progress is not None:
        SFTStage(context, callbacks, progress, interruption).go(folder)
        gc.collect()  # sharded modules form cycles, and RL needs their memory next
        return folder
    own = SFTProgress(context.fabric, folder.with_name(f".{folder.name}.{os.getpid()}.work"), every=None)
    try:
        SFTStage(context, callbacks, own, interruption).go(folder)
    finally:
        own.clear()
    return folder


class SFTStage:
    """The passes of an SFT stage, from the point that `progress` has reached."""

    def __init__(
        self,
        context: RunContext,
        callbacks: Sequence[Callback],
        progress: SFTProgress,
        interruption: Interruption | None,
    ) -> None:
        self.context = context
        self.callbacks = callbacks
        self.progress = progress
        self.interruption = interruption
        self.passes = training_passes(context.cfg.sft)

    def go(self, folder: Path) -> None:
        """Run the remaining passes and publish the SFT model in `folder`."""
        progress = self.progress
        first = progress.number
        is_begun = first > 0
        source = progress.output(first - 1) if is_begun else expanded(self.context.cfg.model.path)
        backbone = load_backbone(self.context, source)
        _check_data(self.context, backbone, self.passes)
        shard(self.context, backbone)
        head = _load_head(progress.output(first - 1), backbone) if is_begun else None
        # A separate reward model continues from these weights, after the LM is saved.
        for number in range(first, len(self.passes)):
            head = self._train(number, backbone, head)
            progress.finish(number, backbone, head)
        if self.context.fabric.is_global_zero:
            self._publish(folder)
        self.context.fabric.barrier()
        progress.clear()

    def _train(self, number: int, backbone: PreTrainedModel, head: ScalarHead | None) -> ScalarHead | None:
        """Run one pass and return its reward head; the backbone is trained in place."""
        context, stage, cfg = self.context, self.passes[number], self.context.cfg.sft
        task = context.task
        if stage.n_answered > 0:
            task = on_policy_preference_pairs(context, backbone, stage.n_answered, stage.seed)
        module = HydraSFT(
            backbone,
            build(cfg.optimizer),
            lm_weight=stage.lm_weight,
            reward_weight=stage.reward_weight,
            n_steps=stage.n_steps,
            n_warmup_steps=cfg.n_warmup_steps,
            reward_head=head,
        )
        datamodule = _data(context, stage, task)
        lengths = [one.n_steps // min(cfg.steps_per_iteration, one.n_steps) for one in self.passes]
        begin, end = sum(lengths[:number]), sum(lengths[: number + 1])
        resumed = self.progress.resumed if number == self.progress.number else None
        if resumed is not None:
            load_trainable(module, resumed.weights())
            with as_config_errors(str(resumed.path)):
                datamodule.load_state_dict(resumed.data_state["data"])
        train(
            context.fabric,
            module,
            datamodule,
            callbacks=self.callbacks,
            first_iteration=begin if resumed is None else resumed.iteration,
            n_iterations=end,
            learner_state=None if resumed is None else resumed.learner_state(),
            max_grad_norm=cfg.max_grad_norm,
            save=self.progress.saver(module, number, end),
            update_context=lambda: explain_out_of_memory(
                lambda: (
                    f"out of memory in the SFT stage; lower sft.batch_size={cfg.batch_size} or "
                    f"sft.n_pairs={cfg.n_pairs}, which make up its batches"
                )
            ),
            interruption=self.interruption,
        )
        return module.reward_head

    def _publish(self, folder: Path) -> None:
        """Move the SFT model to the shared folder, unless another run was faster."""
        with atomic_dir(folder, replaces=False) as partial:
            for number, stage in enumerate(self.passes):
                link_tree(self.progress.output(number), partial / stage.folder)
            self.context.tokenizer.save_pretrained(partial)
            config = OmegaConf.to_container(self.context.cfg.source.sft)
            (partial / SFT_DONE).write_text(json.dumps({"config": config}))


def _load_head(folder: Path, backbone: PreTrainedModel) -> ScalarHead | None:
    weights = load_reward_head(folder)
    if weights is None:
        return None
    head = ScalarHead(text_config(backbone).hidden_size)
    head.load_state_dict(weights)
    return head


def _check_data(context: RunContext, backbone: PreTrainedModel, passes: Sequence[SFTPass]) -> None:
    """Measure all rows and build one batch of each pass, so that bad data is refused before any work."""
    with as_config_errors("task"):
        check_completions_fit(backbone, context.sizes, has_pairs=any(stage.n_pairs > 0 for stage in passes))
        for stage in passes:
            batch = _data(context, stage, context.task).next_batch()
            sides = [batch.chosen, *([] if batch.rejected is None else [batch.rejected])]
            check_length(backbone, max(side.n_tokens for side in sides))


def _data(context: RunContext, stage: SFTPass, task: Task) -> PreferenceDataModule:
    ranks = ranks_of(context.fabric)
    return PreferenceDataModule(
        task,
        PromptSource(task, split="train", seed=stage.seed, rank=ranks.rank, world_size=ranks.size),
        context.tokenizer,
        batch_size=stage.batch_size,
        n_pairs=stage.n_pairs,
        steps_per_loader=min(context.cfg.sft.steps_per_iteration, stage.n_steps),
        seed=stage.seed,
        ranks=ranks,
    )


def on_policy_preference_pairs(
    context: RunContext, backbone: PreTrainedModel, n_prompts: int, seed: int
) -> Preferences:
    """Return pairs of worked solutions and wrong answers that the model samples under the run's cache.

    Raises:
        ConfigError: the model answered every prompt correctly.
        MemoryExhaustedError: sampling ran out of memory.
    """
    source = PromptSource(context.task, split="train", seed=derive_seed(seed, "answered"))
    problems = source.take(n_prompts)
    batch_size = context.cfg.evaluation.batch_size
    pairs: list[PreferencePair] = []
    with track("mistakes", n_prompts) as advance:
        for start in range(0, n_prompts, batch_size):
            batch = problems[start : start + batch_size]
            pairs += _wrong_answers(
                context, backbone, batch, stream(seed, "answer", start, device=backbone.device)
            )
            advance(len(batch))
    if not pairs:
        raise ConfigError(
            f"sft.on_policy_pairs.n_prompts={n_prompts}: the SFT model answered all of "
            "them correctly, so there are no rejected sides; use 0"
        )
    places = [f"wrong answer {number}" for number in range(len(pairs))]
    return Preferences(Table("the model's wrong answers", pairs, places))


@torch.no_grad()
def _wrong_answers(
    context: RunContext, backbone: PreTrainedModel, problems: list[Problem], generator: torch.Generator
) -> list[PreferencePair]:
    settings, batch_size = context.cfg.rollout, context.cfg.evaluation.batch_size
    explained = explain_out_of_memory(
        lambda: (
            f"out of memory while the SFT model answers {len(problems)} prompts at a time; lower "
            f"evaluation.batch_size={batch_size} or rollout.max_new_tokens={settings.max_new_tokens}"
        )
    )
    with explained, context.fabric.autocast():
        rollout = sample_responses(
            backbone,
            context.tokenizer,
            encode_prompts(context.tokenizer, [p.prompt for p in problems]),
            replace(settings, max_rows=None),
            cache=context.cache,
            generator=generator,
        )
    answers = decode_completions(context.tokenizer, rollout.input_ids, rollout.response_mask)
    scores = context.accuracy(problems, answers).tolist()
    return [
        PreferencePair(problem.prompt, problem.solution, answer)
        for problem, answer, score in zip(problems, answers, scores, strict=True)
        if score == 0 and _is_text(context, answer)
    ]


def _is_text(context: RunContext, answer: str) -> bool:
    """True if the answer can be encoded again; an answer with special tokens cannot."""
    try:
        check_encodable(context.tokenizer, answer)
    except ValueError:
        return False
    return True
