"""Checks of a built run on its machine, before any work: rewards, optimizers, ranks, diagnostics."""

import logging

import torch

from lit_rlkv.config import ConfigError, as_config_errors, require
from lit_rlkv.config.errors import one_line
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.validation import N_CHECKED, check_answers, solutions_below_full_score
from lit_rlkv.experience.minibatches import check_minibatches
from lit_rlkv.kvcache.scorer import KVShape
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.reporting.progress import QUIET_S, track
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.runs.preflight import CheckedConfig, as_refusals
from lit_rlkv.runs.run import Run
from lit_rlkv.tasks import UserTask
from lit_rlkv.tasks.rows import N_REPORTED

log = logging.getLogger(__name__)


def check_reward_functions(run: Run) -> None:
    """Score the worked solution of one problem with each reward function, to find its errors early.

    Warns of problems whose solutions get less than full score, or no reward at all.

    Raises:
        ConfigError: a function cannot score a row of the task, does not return a number, or is the reward and
            gives 0 to all solutions that SFT is to teach.
    """
    cfg, rewards = run.cfg, run.rewards
    with as_config_errors("task"):
        check_answers(run.task, rewards.functions, cfg.seed)
        problems = PromptSource(run.task, split="train", seed=cfg.seed).take(1)
    functions = rewards.functions.items() if {"rl", "eval"} & {*cfg.stages} else ()
    names = [name for name, each in functions if "rl" in cfg.stages or each.weight or name == cfg.accuracy]
    with as_config_errors("reward.functions"):
        answers = rewards.ask(problems, [problem.solution for problem in problems], names).collect(
            warns=False
        )
    for name, error in answers.errors.items():
        rewards.close()
        raise ConfigError(
            f"reward.functions.{name} has no score for a worked solution of {run.task}: {error}"
        )
    n_rows = len(run.task) if isinstance(run.task, UserTask) else N_CHECKED

    def score_solutions() -> dict[str, list[str]]:
        with track("score solution of row", n_rows, quiet_s=QUIET_S) as advance:
            return solutions_below_full_score(run.task, rewards, names, cfg.seed, on_progress=advance)

    for name, places in broadcast_from_rank_zero(run.fabric, score_solutions).items():
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
        if run.is_rank_zero:
            log.warning(said)


def try_optimizers(cfg: CheckedConfig, device: torch.device) -> None:
    """Take a step of each optimizer on small parameters of the kinds that it will train.

    Raises:
        ConfigError: it cannot.
    """
    matrix, vector = torch.zeros(4, 4), torch.zeros(4)
    learned = [matrix, *([vector] if LAYOUTS[cfg.roles.layout].trains_backbones else [])]
    if cfg.parts.has_critic:
        learned += ScalarHead(4).parameters()
    if (policy := cfg.parts.cache.make_policy()) is not None and policy.is_trained:
        learned += policy.make_scorer([KVShape(2, 4, 4)]).parameters()
    stages = {
        "sft": ("sft.optimizer", cfg.sft.optimizer, cfg.parts.sft_optimizer, [matrix, vector]),
        "rl": ("optimizer", cfg.optimizer, cfg.parts.optimizer, learned),
    }
    for name, node, make, kinds in [stages[stage] for stage in cfg.stages if stage in stages]:
        parameters = [torch.nn.Parameter(kind.detach().clone().to(device)) for kind in kinds]
        try:
            optimizer = make([{"params": parameters}])
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        except Exception as error:  # optimizers raise any type
            sizes = sorted({kind.ndim for kind in kinds})
            raise ConfigError(
                f"{name}._target_={node._target_} must train parameters of {' and '.join(map(str, sizes))} "
                f"dimensions, by dense gradients and without a closure, and its first step fails: "
                f"{one_line(error) or type(error).__name__}; use another, such as torch.optim.AdamW"
            ) from error


def check_shares(cfg: CheckedConfig, n_ranks: int) -> None:
    """Check that prompts and rows of the SFT stage can be divided evenly among the ranks.

    Raises:
        ConfigError: they cannot; ranks with less work would wait for the others.
    """
    n_shards = cfg.rollout.n_shards or n_ranks
    shared = {
        "rollout.n_shards": (n_shards, n_ranks),
        "rollout.n_prompts": (cfg.rollout.n_prompts, n_shards),
    }
    if "sft" in cfg.stages:
        shared |= {"sft.batch_size": (cfg.sft.batch_size, n_ranks), "sft.n_pairs": (cfg.sft.n_pairs, n_ranks)}
    for name, (value, n_parts) in shared.items():
        require(
            value % n_parts == 0,
            f"{name}={value} cannot be divided evenly over {n_parts} "
            f"{'shards' if name == 'rollout.n_prompts' else 'processes'}; give a multiple of {n_parts}",
        )
    with as_refusals():
        check_minibatches(cfg.parts.advantage, cfg.algorithm, cfg.rollout.n_prompts, n_shards)


def try_diagnostics(run: Run, module: PolicyModule) -> None:
    """Let each diagnostic see the policy, so that one that cannot measure it fails before training.

    Raises:
        ConfigError: a diagnostic cannot measure this policy.
    """
    with as_config_errors("diagnostics"):
        for diagnostic in run.parts.diagnostics:
            diagnostic.on_fit_start(None, module)
