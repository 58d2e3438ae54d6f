"""Run: the objects that all stages of a run share, its folder, its checkpoints and its results."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from lightning.fabric import Fabric
from omegaconf import OmegaConf
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_rlkv.config import AUTO, Config, ConfigError, as_config_errors, require
from lit_rlkv.data.chat import format_prompt, last_end
from lit_rlkv.data.chat_template import RESULT, choose_template
from lit_rlkv.data.tokenizers import load_tokenizer
from lit_rlkv.data.validation import N_CHECKED, Sizes, measure
from lit_rlkv.distributed.ranks import Ranks, ranks_of
from lit_rlkv.distributed.sharding import ShardedStrategy
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.evaluation.perplexity import read_texts
from lit_rlkv.evaluation.results import Results
from lit_rlkv.experience.reward import OWN
from lit_rlkv.files import atomic_dir, link_tree, read_if_there, read_json, write_atomically
from lit_rlkv.interrupts import Interruption
from lit_rlkv.kernels.backend import set_kernels, uses_triton
from lit_rlkv.kernels.shadow_attention import set_shadow_attention
from lit_rlkv.models.compiled_layers import check_compiler
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.out_of_memory import MemoryExhaustedError, peak_memory
from lit_rlkv.reporting.progress import QUIET_S, say, track
from lit_rlkv.rewards import RewardManager, score
from lit_rlkv.run_files import BACKBONE, CHECKPOINTS, CONFIG, EVALUATION, METRICS, PASS_SIZE
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir, RetentionPolicy
from lit_rlkv.runs.launch import WEIGHT_DTYPES, broadcast_from_rank_zero, fabric_precision
from lit_rlkv.runs.preflight import CheckedConfig
from lit_rlkv.runs.resume import config_to_save, has_lost_checkpoints, warn_of_other_ranks
from lit_rlkv.runs.starting_model import SFT_DONE, pretrained_path
from lit_rlkv.settings import show
from lit_rlkv.tasks import Task, UserTask
from lit_rlkv.types import Problem
from lit_rlkv.units import human_bytes

log = logging.getLogger(__name__)
RANKS = "ranks"
"""Folder in a run for the metrics of ranks other than 0."""


class Run:
    """A run: config, processes, tokenizer, task, reward functions; its folder, checkpoints and results.

    The constructor builds what all stages share and writes nothing. `begin` takes up the folder on all ranks,
    the rewards' own context manager ends their workers.

    Args:
        cfg: checked config.
        fabric: launched Fabric; None: one process on one device.
        folder: folder of the run, the same on all ranks; None: the run keeps nothing.
        console: console on which rank 0 prints; None: nothing is printed.
        interruption: delivers signals; None: they are not handled.

    Raises:
        ConfigError: the device, the tokenizer or the task's texts do not fit the config.
    """

    def __init__(
        self,
        cfg: CheckedConfig,
        fabric: Fabric | None = None,
        folder: Path | None = None,
        console: Console | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        disable_progress_bar()  # transformers shows one for every load
        if cfg.fabric.n_threads is not None:
            torch.set_num_threads(cfg.fabric.n_threads)
        set_kernels(cfg.kernels)
        set_shadow_attention(cfg.roles.shadow_attention)
        precision = fabric_precision(cfg.fabric.precision)
        self.cfg = cfg
        self.parts = cfg.parts
        self.fabric = fabric or Fabric(accelerator=cfg.fabric.accelerator, devices=1, precision=precision)
        self._folder = folder
        self.console = console or Console(quiet=True)
        self.interruption = interruption or Interruption()
        self.pass_limit = TOKENS_PER_PASS if folder is None else load_pass_limit(folder)
        """Most tokens of a pass under `fabric.tokens_per_pass=auto`."""
        self.predicted = ""
        """Peaks of memory that were counted before any work."""
        _check_device(cfg, self.fabric.device)
        with as_config_errors("model"):
            path = broadcast_from_rank_zero(
                self.fabric, lambda: pretrained_path(cfg.model.path, cfg.runs_dir)
            )
            self.tokenizer = load_tokenizer(path)
            if RESULT not in format_prompt(self.tokenizer, RESULT):  # as of models for images
                raise ConfigError(
                    f"model.path={path}: its chat template leaves out texts of the user; use another"
                )
        self.task = cfg.parts.task
        self.rewards = RewardManager(cfg.parts.reward_functions)
        """Reward functions; their workers start at the first call."""
        self.environments = self._make_environments()
        """None: responses have one turn."""
        self.sizes = _measured(cfg, self.tokenizer, self.task, self.environments)
        """Token counts of the task's texts, of all or of the first ones."""
        with as_config_errors("evaluation.perplexity"):
            given = cfg.evaluation.perplexity
            self.texts = None if given is None else read_texts(given, self.tokenizer)
            """Token ids of the texts whose perplexity evaluations measure; None without them."""
        self.results = Results()

    def _make_environments(self) -> EnvironmentPool | None:
        factory, node = self.parts.environment_factory, self.cfg.environment
        if factory is None or node is None:
            choose_template(self.tokenizer, ())
            return None
        environments, role = EnvironmentPool(factory, self.cfg.rollout, self.tokenizer), node.get("role")
        with as_config_errors("environment" if role is None else f"environment.role={role}"):
            environments.check()
        return environments

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        assert self._folder is not None, "this run keeps nothing"
        return self._folder

    @property
    def own_folder(self) -> Path:
        """Folder of this rank's metrics and samples."""
        return self.folder if self.is_rank_zero else self.folder / RANKS / str(self.fabric.global_rank)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return ranks_of(self.fabric)

    @property
    def is_rank_zero(self) -> bool:
        return bool(self.fabric.is_global_zero)

    @property
    def is_sharded(self) -> bool:
        """True if the layers of backbones are sharded over the ranks."""
        return isinstance(self.fabric.strategy, ShardedStrategy)

    @property
    def checkpoints(self) -> CheckpointDir:
        """The checkpoints of RL."""
        keep = self.cfg.callbacks
        retention = RetentionPolicy(keep.keep_last, keep.keep_best, keep.best_metric, keep.best_mode)
        return CheckpointDir(self.folder / CHECKPOINTS, retention)

    @cached_property
    def resume_from(self) -> Checkpoint | None:
        """The checkpoint to resume from; None: training starts from the first iteration.

        All ranks must ask for it at the same place at first.

        Raises:
            ConfigError: all checkpoints of the folder are broken.
        """
        return broadcast_from_rank_zero(self.fabric, self.checkpoints.latest)

    @property
    def resumed_at(self) -> int:
        """Iterations in the checkpoint to resume from; 0 without one."""
        return 0 if self.resume_from is None else self.resume_from.iteration

    def verified(self, problems: Sequence[Problem], completions: Sequence[str]) -> Float[Tensor, " batch"]:
        """Return the scores of completions by the task, or by the reward function of the accuracy."""
        name = self.cfg.accuracy
        if name is None or name in OWN:
            return score(self.task.score, problems, completions).total
        return self.rewards.ask(problems, completions, [name]).collect().scores[name]

    def begin(self) -> None:
        """Take up the folder: read the newest checkpoint and earlier results; rank 0 writes the config.

        Raises:
            ConfigError: all checkpoints are broken, or those of trained iterations are gone.
        """
        if self.resume_from is not None:
            say(self.console, f"resume after iteration {self.resumed_at} of {self.folder}")
            warn_of_other_ranks(self.resume_from, self.fabric.world_size)
        broadcast_from_rank_zero(self.fabric, self._check_rows)
        self.fabric.barrier()  # every rank has read the folder before rank 0 writes to it
        if self.is_rank_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            saved = config_to_save(self.cfg.source, self.folder)
            write_atomically(self.folder / CONFIG, OmegaConf.to_yaml(saved))
        self.own_folder.mkdir(parents=True, exist_ok=True)
        self.results = broadcast_from_rank_zero(self.fabric, lambda: Results.load(self.folder))

    def _check_rows(self) -> None:
        """Refuse to begin again a run whose checkpoints are gone: its metrics would be overwritten."""
        require(
            not has_lost_checkpoints(self.folder, self.cfg),
            f"{self.folder} has metrics of iterations that were trained, and no checkpoint; restore its "
            f"folder {CHECKPOINTS}, or remove {METRICS} to train from the start",
        )

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to a stage and save the results, also if the block fails."""
        seconds, started_at = self.results.stage_seconds, time.perf_counter()
        try:
            yield
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started_at
            self.save_results()

    def save_results(self, *, must_succeed: bool = False) -> None:
        """Write the results so far. A full disk costs a warning; the last save tries again."""
        if not self.is_rank_zero:
            return
        try:
            self.results.save(self.folder)
        except OSError as error:
            if must_succeed:
                raise
            log.warning("%s in %s cannot be written: %s", EVALUATION, self.folder, error)

    def keep_backbone(self, start: Path) -> None:
        """Link the SFT model into the run, so that it survives a clean-up of the shared folder."""
        is_sft_model = (start / SFT_DONE).is_file()
        if self.is_rank_zero and is_sft_model and not (self.folder / BACKBONE / SFT_DONE).is_file():
            with atomic_dir(self.folder / BACKBONE) as partial:
                link_tree(start, partial)
        self.fabric.barrier()

    @contextmanager
    def smaller_passes_after_failure(self) -> Iterator[None]:
        """Say the peak of memory beside the predicted one in an error, and resume with half of the pass."""
        try:
            yield
        except MemoryExhaustedError as error:
            if self.cfg.fabric.tokens_per_pass == AUTO and error.tokens_per_pass is not None:
                limit = max(error.tokens_per_pass // 2, 1)
                write_atomically(self.folder / PASS_SIZE, json.dumps(limit))
                log.warning("resume=%s continues with at most %d tokens in a pass", self.folder, limit)
            peak = human_bytes(peak_memory(self.fabric.device))
            error.args = (f"{error}\nThe peak was {peak}; predicted of RL: {self.predicted or 'nothing'}",)
            raise


def load_pass_limit(folder: Path) -> int:
    """Return the most tokens of a pass under `auto`: the default, or half of what did not fit in this run.

    Raises:
        DamagedFileError: the file with the number cannot be read.
    """
    return read_if_there(folder / PASS_SIZE, lambda path: int(read_json(path)), TOKENS_PER_PASS)


def _check_device(cfg: Config, device: torch.device) -> None:
    """Refuse settings that the device does not support, before a model is loaded."""
    with as_config_errors("kernels"):
        has_kernels = uses_triton(torch.empty(0, dtype=WEIGHT_DTYPES[cfg.fabric.precision], device=device))
    require(
        cfg.rollout.n_splits is None or has_kernels,
        f"rollout.n_splits={cfg.rollout.n_splits} needs the Triton kernels, which do not run on "
        f"{device.type} with kernels={cfg.kernels}, fabric.precision={cfg.fabric.precision}; leave it null",
    )
    require(
        not cfg.rollout.compile_layers or cfg.fabric.strategy != "fsdp2",
        "rollout.compile_layers=true cannot compile sharded layers (fabric.strategy=fsdp2); leave it out",
    )
    if cfg.rollout.compile_layers:
        with as_config_errors("rollout.compile_layers"):
            check_compiler(device)
    if cfg.rollout.cuda_graph:
        require(
            cfg.fabric.strategy != "fsdp2",
            "rollout.cuda_graph=true cannot capture a decode step that gathers sharded layers "
            "(fabric.strategy=fsdp2); leave it out",
        )
        require(
            device.type == "cuda",
            f"rollout.cuda_graph=true needs CUDA, got device {device.type}; use null, which captures if "
            "possible",
        )


def _measured(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, task: Task, environments: EnvironmentPool | None
) -> Sizes:
    """Count tokens of prompts and solutions; refuse a max_new_tokens that would cut solutions for SFT."""
    limit = cfg.rollout.max_new_tokens
    n_rows = len(task) if isinstance(task, UserTask) else N_CHECKED
    with as_config_errors("task"), track("count tokens of row", n_rows, quiet_s=QUIET_S) as advance:
        sizes = measure(
            task,
            tokenizer,
            cfg.seed,
            needs_eval_split="eval" in cfg.stages,
            on_progress=advance,
            tools=() if environments is None else environments.tools,
            observe=None if environments is None else environments.worked_observation,
        )
    longest = max(sizes.solutions)
    if "sft" in cfg.stages and min(sizes.solutions) == len(last_end(tokenizer)):
        raise ConfigError(
            f"stages={show(cfg.stages)}: sft imitates worked solutions, and {task} has prompts alone; leave "
            "it out, or set task.answer_column or task.solution_column"
        )
    if "sft" in cfg.stages and task.is_verifiable and longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens={limit} cuts worked solutions, which take up to {longest} tokens "
            f"with their end; raise it to at least {longest}"
            + sizes.longest(sizes.solutions, lambda n_tokens: n_tokens > limit)
        )
    return sizes
