"""The evaluation stage: accuracy on held-out prompts by cache, and the quality of the reward model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from lit_rlkv.config.building import as_config_errors
from lit_rlkv.data.pairs import preference_pair
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.distributed.ranks import ranks_of
from lit_rlkv.evaluation.evaluator import CacheScore, EvalConfig, Evaluator
from lit_rlkv.evaluation.reward_model import RewardReport, score_pairs
from lit_rlkv.faults import Interruption
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.adapters import lora_layers, switched
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.hydra import Roles, acting_as, make_head
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.reporting.final import final_metrics
from lit_rlkv.reporting.progress import track
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.context import RunContext, load_backbone
from lit_rlkv.runs.shard_backbone import shard
from lit_rlkv.runs.starting_model import critic_dir, load_reward_head
from lit_rlkv.runs.training_run import TrainingRun
from lit_rlkv.types import EvalRow, PreferencePair, Rollout


def evaluate_before_training(run: TrainingRun, module: PolicyModule, start: str | Path) -> None:
    """Score the reward model and the policy that training starts from, unless an earlier process did.

    The policy is scored again where the evaluation's settings have changed since.
    """
    context, results = run.context, run.results
    if results.reward_model is None:
        with run.timed("eval"):
            results.reward_model = report_on_reward(context, module.roles, start)
    if "rl" not in context.cfg.stages and run.resume_from is None:
        return  # evaluate_after_training scores the same policy
    settings = cast(dict[str, Any], OmegaConf.to_container(context.cfg.evaluation, resolve=True))
    settings.pop("batch_size")  # changes no result
    if results.before and results.settings in ({}, settings):
        return
    run.console.print("[bold]eval[/] before training")
    with run.timed("eval"):
        results.before, results.rollout = evaluate_policy(context, module.roles, run.interruption)
        results.settings = settings


def evaluate_after_training(run: TrainingRun, module: PolicyModule) -> None:
    """Score the policy as it is now and save all results of the run."""
    context, results = run.context, run.results
    run.console.print("[bold]eval[/]" + (" after training" if "rl" in context.cfg.stages else ""))
    with run.timed("eval"):
        results.after, results.rollout = evaluate_policy(context, module.roles, run.interruption)
    budget = None if context.cache.is_dense else context.cache.budget
    results.final = final_metrics(results.before, results.after, budget)
    run.save_results(must_succeed=True)


def evaluation_caches(cfg: DictConfig, policies: Sequence[str] | None = None) -> list[CacheSpec]:
    """Dense, then each policy at each budget asked for, the one of the rollouts among them.

    Args:
        policies: of eviction; None takes the run's own.

    Raises:
        ValueError: a budget that the cache's sink and window leave no slot of.
    """
    chosen = [name for name in dict.fromkeys(policies or [cfg.cache.policy]) if name != "dense"]
    budgets = sorted({*cfg.evaluation.budgets, cfg.cache.budget}, reverse=True)
    sparse = [
        CacheSpec(**{**cfg.cache, "policy": policy, "budget": budget})
        for policy in chosen
        for budget in budgets
    ]
    return [CacheSpec.dense(), *sparse]


def score_caches(
    parts: RunContext,
    roles: Roles,
    caches: Sequence[CacheSpec],
    n_samples: int = 1,
    interruption: Interruption | None = None,
) -> Iterator[CacheScore]:
    """What the policy scores with each cache on the same held-out prompts, one after the other.

    Args:
        interruption: of a run that may be asked to end, which several processes do before a cache.
    """
    interruption = interruption or Interruption()
    cfg = parts.cfg.evaluation
    source = PromptSource(parts.task, split="eval", seed=parts.cfg.seed)
    problems = source.take(min(cfg.n_prompts, source.size or cfg.n_prompts))
    config = EvalConfig(
        max_new_tokens=parts.cfg.rollout.max_new_tokens,
        temperature=cfg.temperature,
        sampling_temperature=parts.cfg.rollout.temperature,
        n_mismatch=cfg.n_mismatch,
        batch_size=cfg.batch_size,
        seed=parts.cfg.seed,
        n_samples=n_samples,
        rows_per_pass=parts.cfg.rollout.rows_per_pass,
        cuda_graph=parts.cfg.rollout.cuda_graph,
        max_failed=parts.cfg.reward.max_failed,
    )
    evaluator = Evaluator(
        roles, parts.tokenizer, parts.task, problems, config, parts.accuracy, ranks_of(parts.fabric)
    )
    with track("eval", len(caches)) as advance, parts.fabric.autocast():
        for cache in caches:
            interruption.end_if_asked(parts.fabric)
            found = evaluator.score_cache(cache)
            advance(accuracy=found.row.accuracy)
            yield found


def evaluate_policy(
    parts: RunContext, roles: Roles, interruption: Interruption | None = None
) -> tuple[list[EvalRow], Rollout | None]:
    """Accuracy on held-out prompts with each cache, and the first rank's rollout under the run's own budget.

    Raises:
        InterruptedRunError: the run was asked to end; what was scored is lost.
    """
    caches = evaluation_caches(parts.cfg)
    rows, pictured = [], None
    scores = score_caches(parts, roles, caches, interruption=interruption)
    for cache, found in zip(caches, scores, strict=True):
        rows.append(found.row)
        if cache == parts.cache or pictured is None:
            pictured = found.rollout
    return rows, pictured


def held_out_pairs(parts: RunContext) -> list[PreferencePair]:
    """Pairs of the eval split, `evaluation.n_prompts` of them or as many as it has."""
    cfg = parts.cfg
    rng = Random(derive_seed(cfg.seed, "corrupt", "eval"))
    with as_config_errors("task"):
        source = PromptSource(parts.task, split="eval", seed=cfg.seed)
        n_pairs = min(cfg.evaluation.n_prompts, source.size or cfg.evaluation.n_prompts)
        return [preference_pair(parts.task, problem, rng) for problem in source.take(n_pairs)]


def report_on_reward(parts: RunContext, roles: Roles, start: str | Path) -> RewardReport | None:
    """What the reward head of a warm model is worth, whether or not this run asks for its opinion.

    None where there is no such head. To be asked before training.
    """
    folder = critic_dir(start)
    weights = load_reward_head(folder)
    if weights is None:
        return None
    if "reward" in roles.needed:
        with acting_as(roles, "reward") as backbone:
            return evaluate_reward(parts, backbone, roles.head("reward"))
    # Before training the policy's backbone holds the warm weights, so that no copy of them is needed.
    if folder == start:
        backbone = roles.backbone("policy")
    else:
        backbone = load_backbone(parts, folder)
        shard(parts, backbone)
    with switched(lora_layers(backbone), None):
        return evaluate_reward(parts, backbone, make_head(backbone, weights))


def evaluate_reward(parts: RunContext, backbone: PreTrainedModel, head: ScalarHead) -> RewardReport:
    """What the head makes of held-out pairs, on the backbone in whatever role it has now."""
    pairs = held_out_pairs(parts)
    batch_size = parts.cfg.evaluation.batch_size
    with track("reward", len(pairs)) as advance, parts.fabric.autocast():
        return score_pairs(backbone, head, parts.tokenizer, pairs, batch_size, on_scored=advance)
