"""The SFT stage (Hydra-SFT): train LM head and reward head, and save the model for later runs."""

import gc
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning import Callback
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import gather_full
from lit_rlkv.files import atomic_dir, link_tree
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.hydra import make_head
from lit_rlkv.models.kv_scorer import KV_SCORER, KV_SCORER_FILE, save_kv_scorer
from lit_rlkv.models.model_files import find_file
from lit_rlkv.models.preparation import has_finite_logits
from lit_rlkv.modules.eviction_start import EvictionStart
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.non_finite import NonFiniteError, find_divergence
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.planning.advice import keeping_less
from lit_rlkv.reporting.metrics_file import MetricsFile
from lit_rlkv.reporting.progress import ProgressBar, say
from lit_rlkv.run_files import CHECKPOINTS, SFT_METRICS
from lit_rlkv.runs.checkpoint import CheckpointDir, RetentionPolicy
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.runs.memory import choose_checkpoints, passes_of, tokens_per_pass
from lit_rlkv.runs.policy import load_backbone, make_scorer, shard
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.saver import CheckpointSaver
from lit_rlkv.runs.starting_model import (
    REWARD_HEAD,
    SFT_DONE,
    load_reward_head,
    pretrained_path,
    sft_model_dir,
)
from lit_rlkv.stages.sft_passes import (
    SFTPass,
    check_data,
    on_policy_preference_pairs,
    pass_data,
    training_passes,
)
from lit_rlkv.tasks import Task
from lit_rlkv.trainer import TrainState, train

SFT_WORK = "sft"
"""Folder in a run for the models and checkpoints of its SFT stage."""


def make_starting_model(run: Run, start: str | Path | None) -> str | Path:
    """Return the model that RL and evaluation start from; train it by SFT if there is none yet."""
    if start is None:
        say(run.console, "supervised fine-tuning (its model is kept for later runs)", stage="sft")
        every = run.cfg.callbacks.checkpoint_every
        stage = SFTStage(run, run.folder / SFT_WORK, every)
        bar = ProgressBar("sft iteration", run.console, sum(stage.lengths), stage.resumed_at)
        with run.timed("sft"):
            last = stage.resumed.metrics if run.is_rank_zero and stage.resumed is not None else None
            metrics = MetricsFile(run.own_folder / SFT_METRICS, stage.resumed_at, last)
            start = stage.train([bar, metrics])
            del stage
            gc.collect()  # sharded modules form cycles, and RL needs their memory next
    else:
        reason = "skipped" if "sft" in run.cfg.stages else "not in stages"
        say(run.console, f"{reason}: start from {start}", stage="sft")
    run.keep_backbone(Path(start))
    return start


def run_sft(run: Run, callbacks: Sequence[Callback]) -> Path:
    """Run the SFT stage without checkpoints, and return the folder of the SFT model."""
    folder = sft_model_dir(run.cfg)
    stage = SFTStage(run, folder.with_name(f".{folder.name}.{os.getpid()}.work"), every=None)
    try:
        return stage.train(callbacks)
    finally:
        stage.clear()


class SFTStage:
    """Trains on worked solutions and preference pairs, and resumes where an earlier process ended.

    Finished passes are model folders in a folder that has the name of the SFT model, so other settings or
    data begin anew; the current pass has checkpoints there.

    Args:
        root: folder of this stage, a different one for each run.
        every: iterations between checkpoints; None: no checkpoints.

    Raises:
        ConfigError: all checkpoints are broken.
    """

    def __init__(self, run: Run, root: Path, every: int | None) -> None:
        self.run = run
        self.root = root
        self.work = root / sft_model_dir(run.cfg).name
        self.every = every
        self.passes = training_passes(run.cfg.sft)
        self.checkpoints = CheckpointDir(self.work / CHECKPOINTS, RetentionPolicy(n_last=1))
        self.lengths = [_n_iterations(one, run.cfg.sft.steps_per_iteration) for one in self.passes]
        """Iterations of each pass."""
        numbers = range(len(self.passes))
        self.first, latest = broadcast_from_rank_zero(
            run.fabric,
            lambda: (sum(self._output(n).is_dir() for n in numbers), self.checkpoints.latest()),
        )
        """Number of the pass to start or resume."""
        begin = sum(self.lengths[: self.first])
        self.resumed = latest if latest is not None and latest.iteration > begin else None
        """Checkpoint within the pass to resume; None: it starts from its beginning."""
        self.resumed_at = begin if self.resumed is None else self.resumed.iteration
        """Completed iterations of all passes."""

    def train(self, callbacks: Sequence[Callback]) -> Path:
        """Run the remaining passes, and return the folder of the SFT model.

        The folder holds backbone and tokenizer, and `REWARD_HEAD` if the reward head was trained with the LM
        head. A separate reward model, which starts from the finished LM, has its own folder `REWARD_MODEL`.

        Raises:
            ConfigError: the model cannot learn from the task's solutions or pairs; raised before any
                training.
            InterruptedRunError: a signal ended the run; its state is saved.
        """
        check_hooks(callbacks)
        run, first = self.run, self.first
        is_begun = first > 0
        given = pretrained_path(run.cfg.model.path, run.cfg.runs_dir)
        backbone = load_backbone(run, self._output(first - 1) if is_begun else given)
        check_data(run, backbone, self.passes)
        scorer = None
        if any(stage.trains_scorer for stage in self.passes[first:]):
            scorer = make_scorer(run.cfg, backbone, given)
            delattr(backbone, KV_SCORER)  # a part of its own pass, not of the LM
        shard(run, backbone)
        self.sizes = passes_of(run, backbone)
        self.checkpoints_layers = choose_checkpoints(run, self.sizes)
        weights = load_reward_head(self._output(first - 1)) if is_begun else None
        head = None if weights is None else make_head(backbone, weights)
        # A separate reward model continues from these weights, after the LM is saved.
        for number in range(first, len(self.passes)):
            if self.passes[number].trains_scorer:
                assert scorer is not None
                self._start_scorer(number, backbone, scorer, callbacks)
                continue
            head = self._train_pass(number, backbone, head, callbacks)
            self._save_model(number, backbone, head)
        folder = sft_model_dir(run.cfg)
        if run.is_rank_zero:
            # Move the model to the shared folder, unless another run was faster.
            with atomic_dir(folder, replaces=False) as partial:
                for number, stage in enumerate(self.passes):
                    link_tree(self._output(number), partial / stage.folder)
                run.tokenizer.save_pretrained(partial)
                file = None if given is None else find_file(given, KV_SCORER_FILE)
                if file is not None and not (partial / KV_SCORER_FILE).is_file():  # for the evictions of RL
                    shutil.copyfile(file, partial / KV_SCORER_FILE)
                config = OmegaConf.to_container(run.cfg.source.sft)
                (partial / SFT_DONE).write_text(json.dumps({"config": config}))
        run.fabric.barrier()
        self.clear()
        return folder

    def _train_pass(
        self, number: int, backbone: PreTrainedModel, head: ScalarHead | None, callbacks: Sequence[Callback]
    ) -> ScalarHead | None:
        """Run one pass of the LM or a reward model and return its reward head; the backbone is trained."""
        run, stage, cfg = self.run, self.passes[number], self.run.cfg.sft
        task = run.task
        if stage.n_answered > 0:  # asked again on resume, because the answers are not saved
            task = on_policy_preference_pairs(run, backbone, stage.n_answered, stage.seed)
        module = HydraSFT(
            backbone,
            run.parts.sft_optimizer,
            lm_weight=stage.lm_weight,
            reward_weight=stage.reward_weight,
            n_steps=stage.n_steps,
            n_warmup_steps=cfg.n_warmup_steps,
            reward_head=head,
            checkpoints_layers=self.checkpoints_layers,
        )
        self._train_module(number, module, task, callbacks)
        return module.reward_head

    def _start_scorer(
        self, number: int, backbone: PreTrainedModel, scorer: nn.Module, callbacks: Sequence[Callback]
    ) -> None:
        """Run the pass that trains a scorer on a finished LM, and save it beside that."""
        run, cfg = self.run, self.run.cfg
        trained = [one for one in backbone.parameters() if one.requires_grad]
        module = EvictionStart(
            backbone,
            scorer,
            run.parts.optimizer,
            cache=run.parts.cache,
            lr_scale=cfg.algorithm.eviction.lr_scale,
            n_steps=self.passes[number].n_steps,
            n_warmup_steps=cfg.sft.n_warmup_steps,
        )
        self._train_module(number, module, run.task, callbacks)
        for one in trained:  # for a reward model that continues from them
            one.requires_grad_(True)
        if run.is_rank_zero:
            with atomic_dir(self._output(number)) as partial:
                link_tree(self._output(number - 1), partial)
                save_kv_scorer(scorer.state_dict(), partial)

    def _train_module(
        self, number: int, module: HydraSFT | EvictionStart, task: Task, callbacks: Sequence[Callback]
    ) -> None:
        """Train the module of a pass to its end, from the checkpoint to resume if that is in it."""
        run, stage, cfg = self.run, self.passes[number], self.run.cfg.sft
        checkpoints, device = self.checkpoints_layers, module.backbone.device
        datamodule = pass_data(run, stage, task, tokens_per_pass(run, self.sizes, checkpoints))
        begin, end = sum(self.lengths[:number]), sum(self.lengths[: number + 1])
        resumed = self.resumed if number == self.first else None
        saver = CheckpointSaver(run.fabric, module, self.checkpoints, self.every, resumed)

        def save(state: TrainState) -> None:
            # The end of a pass saves a model instead, unless a signal is about to end the run there.
            if state.iteration < end or run.interruption.is_agreed:
                saver.save(state)

        train(
            run.fabric,
            module,
            datamodule,
            callbacks=callbacks,
            first_iteration=begin if resumed is None else resumed.iteration,
            n_iterations=end,
            learner_state=saver.load(datamodule),
            max_grad_norm=cfg.max_grad_norm,
            save=save,
            update_context=lambda: explain_out_of_memory(
                lambda: (
                    f"out of memory in the SFT stage; set fabric.tokens_per_pass below "
                    f"{datamodule.tokens_per_pass}, which helps while a pass holds more than one sequence"
                    + "".join(f", or {help}" for help in keeping_less(checkpoints, device))
                ),
                lambda: datamodule.tokens_per_pass,
            ),
            interruption=run.interruption,
        )

    def _save_model(self, number: int, backbone: PreTrainedModel, head: ScalarHead | None) -> None:
        """Save the model that a pass has trained.

        Raises:
            NonFiniteError: it has diverged.
        """
        with self.run.fabric.autocast():
            is_finite = has_finite_logits(backbone)
        FORWARD_COORDINATOR.wait()
        # Every rank takes part in gathering sharded layers.
        weights = {name: gather_full(value) for name, value in backbone.state_dict().items()}
        trained = {name: weights[name] for name, _ in backbone.named_parameters()}
        if head is not None:
            trained |= head.state_dict(prefix="reward_head.")
        fabric = self.run.fabric
        problem = broadcast_from_rank_zero(fabric, lambda: find_divergence(trained, is_finite))
        if problem is not None:
            raise NonFiniteError(
                f"training has diverged in the SFT stage, whose model is not saved: {problem}. Start a new "
                "run with a lower sft.optimizer.lr"
            )
        if fabric.is_global_zero:
            with atomic_dir(self._output(number)) as partial:
                backbone.save_pretrained(partial, state_dict=weights)
                if head is not None:
                    save_file(head.state_dict(), partial / REWARD_HEAD)

    def _output(self, number: int) -> Path:
        """Return the model folder of a finished pass."""
        return self.work / f"pass-{number}"

    def clear(self) -> None:
        """Remove the folder of the stage."""
        shutil.rmtree(self.root, ignore_errors=True)


def _n_iterations(one: SFTPass, steps_per_iteration: int) -> int:
    """Return the iterations of a pass; steps that do not fill one are left out."""
    return one.n_steps // min(steps_per_iteration, one.n_steps)
