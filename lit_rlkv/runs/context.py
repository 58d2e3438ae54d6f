"""RunContext: the objects that all stages of a run share."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]
from jaxtyping import Float
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_rlkv.config import (
    Config,
    ConfigError,
    as_config_errors,
    check_source,
    expanded,
    find_gguf,
    is_local,
    require,
)
from lit_rlkv.config.errors import one_line
from lit_rlkv.data.chat import format_prompt, last_end
from lit_rlkv.data.chat_template import RESULT, choose_template
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import load_tokenizer
from lit_rlkv.data.validation import (
    N_CHECKED,
    Sizes,
    check_answers,
    measure,
    solutions_below_full_score,
)
from lit_rlkv.distributed.sharding import ShardedStrategy
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.experience.reward import OWN
from lit_rlkv.kernels.backend import set_kernels, uses_triton
from lit_rlkv.models.compiled_layers import check_compiler
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.reporting.progress import QUIET_S, track
from lit_rlkv.rewards import RewardManager, score
from lit_rlkv.runs.launch import broadcast_from_rank_zero, fabric_precision
from lit_rlkv.runs.preflight import CheckedConfig
from lit_rlkv.settings import show
from lit_rlkv.tasks import Task, UserTask
from lit_rlkv.tasks.rows import N_REPORTED
from lit_rlkv.types import Problem

log = logging.getLogger(__name__)
HUB_TIMEOUT_S = 10.0
"""Longest wait for the hub to say that a model exists."""
CONVERTED_MODELS = "converted_models"
"""Folder in `runs_dir` of GGUF files converted to safetensors, which runs share."""
WEIGHT_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
}
"""Dtype of the weights for each `fabric.precision`."""


@dataclass(frozen=True)
class RunContext:
    """Config, processes, tokenizer, task and reward functions of a run."""

    cfg: CheckedConfig
    fabric: Fabric
    tokenizer: PreTrainedTokenizerBase
    task: Task
    sizes: Sizes
    """Token counts of the task's texts, of all or of the first ones."""
    rewards: RewardManager
    """Reward functions; their workers start at the first call."""
    environments: EnvironmentPool | None
    """None: responses have one turn."""
    pass_limit: int = field(default=TOKENS_PER_PASS, kw_only=True)
    """Most tokens of a pass under `fabric.tokens_per_pass=auto`."""

    @property
    def is_sharded(self) -> bool:
        """True if the layers of backbones are sharded over the ranks."""
        return isinstance(self.fabric.strategy, ShardedStrategy)

    def verified(self, problems: Sequence[Problem], completions: Sequence[str]) -> Float[Tensor, " batch"]:
        """Return the scores of completions by the task, or by the reward function of the accuracy."""
        name = self.cfg.accuracy
        if name is None or name in OWN:
            return score(self.task.score, problems, completions).total
        return self.rewards.ask(problems, completions, [name]).collect().scores[name]


def pretrained_path(path: str | None, runs_dir: str, key: str = "model.path") -> str | None:
    """Return what transformers loads for a model path: for a GGUF file, the folder it is converted to.

    Raises:
        ConfigError: the file cannot be converted, or there is no such folder, and the hub cannot be reached.
    """
    if path is None:
        return None
    check_source(path, key)
    file = find_gguf(path, key)
    with as_config_errors(key):
        if file is not None:
            return str(converted_gguf(file, Path(runs_dir) / CONVERTED_MODELS))
        if not is_local(path) and not isinstance(try_to_load_from_cache(path, "config.json"), str):
            try:  # transformers asks again and again for a minute
                HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
            except HfHubHTTPError:  # an answer, which transformers explains
                pass
            except (OSError, HTTPError) as error:
                raise ConfigError(
                    f"{key}={path} is no folder here, and the hub cannot be asked for it: {one_line(error)}; "
                    "correct the path, or fetch the model first"
                ) from error
    return expanded(path)


def build_context(
    cfg: CheckedConfig, fabric: Fabric | None = None, pass_limit: int = TOKENS_PER_PASS
) -> RunContext:
    """Build what all stages share; without `fabric` in one process on one device."""
    disable_progress_bar()  # transformers shows one for every load
    if cfg.fabric.n_threads is not None:
        torch.set_num_threads(cfg.fabric.n_threads)
    set_kernels(cfg.kernels)
    precision = fabric_precision(cfg.fabric.precision)
    fabric = fabric or Fabric(accelerator=cfg.fabric.accelerator, devices=1, precision=precision)
    _check_device(cfg, fabric.device)
    with as_config_errors("model"):
        path = broadcast_from_rank_zero(fabric, lambda: pretrained_path(cfg.model.path, cfg.runs_dir))
        tokenizer = load_tokenizer(path)
        if RESULT not in format_prompt(tokenizer, RESULT):  # as of models for images
            raise ConfigError(
                f"model.path={path}: its chat template leaves out texts of the user; use another"
            )
    task, rewards = cfg.parts.task, RewardManager(cfg.parts.reward_functions)
    factory = cfg.parts.environment_factory
    environments = None if factory is None else EnvironmentPool(factory, cfg.rollout, tokenizer)
    if environments is None:
        choose_template(tokenizer, ())
    if environments is not None and cfg.environment is not None:
        role = cfg.environment.get("role")
        with as_config_errors("environment" if role is None else f"environment.role={role}"):
            environments.check()
    sizes = _measured(cfg, tokenizer, task, environments)
    return RunContext(cfg, fabric, tokenizer, task, sizes, rewards, environments, pass_limit=pass_limit)


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


def check_reward_functions(context: RunContext) -> None:
    """Score the worked solution of one problem with each reward function, to find its errors early.

    Warns of problems whose solutions get less than full score, or no reward at all.

    Raises:
        ConfigError: a function cannot score a row of the task, does not return a number, or is the reward and
            gives 0 to all solutions that SFT is to teach.
    """
    cfg, rewards = context.cfg, context.rewards
    with as_config_errors("task"):
        check_answers(context.task, rewards.functions, cfg.seed)
        problems = PromptSource(context.task, split="train", seed=cfg.seed).take(1)
    functions = rewards.functions.items() if {"rl", "eval"} & {*cfg.stages} else ()
    names = [name for name, each in functions if "rl" in cfg.stages or each.weight or name == cfg.accuracy]
    with as_config_errors("reward.functions"):
        answers = rewards.ask(problems, [problem.solution for problem in problems], names).collect(
            warns=False
        )
    for name, error in answers.errors.items():
        rewards.close()
        raise ConfigError(
            f"reward.functions.{name} has no score for a worked solution of {context.task}: {error}"
        )
    n_rows = len(context.task) if isinstance(context.task, UserTask) else N_CHECKED

    def score_solutions() -> dict[str, list[str]]:
        with track("score solution of row", n_rows, quiet_s=QUIET_S) as advance:
            return solutions_below_full_score(context.task, rewards, names, cfg.seed, on_progress=advance)

    for name, places in broadcast_from_rank_zero(context.fabric, score_solutions).items():
        function = rewards.functions[name]
        marker = getattr(function, "answer_after", None)
        said = (
            f"reward.functions.{name} gives less than full score to the solutions of {len(places)} of "
            f"{n_rows} rows, the first are {', '.join(places[:N_REPORTED])}; fix them or drop the rows, as "
            "responses like them are not rewarded"
        )
        if marker is not None:
            said += f" (it reads what follows {marker!r}: reward.functions.{name}.answer_after)"
        others = cfg.reward.verifier or cfg.reward.learned or cfg.reward.environment or function.weight <= 0
        require("sft" not in cfg.stages or len(places) < n_rows or bool(others), said)
        if context.fabric.is_global_zero:
            log.warning(said)
