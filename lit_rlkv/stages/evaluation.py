"""Score a policy on held-out prompts, dense and at each budget."""

from lit_rlkv.callbacks.progress import track
from lit_rlkv.data.evaluation import EvalConfig, Evaluator
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.stages.parts import Parts
from lit_rlkv.types import EvalRow, Rollout


def evaluation_caches(parts: Parts) -> list[CacheSpec]:
    """Dense, then the run's cache at each budget asked for, the one of the rollouts among them."""
    spec = parts.cache
    if spec.is_dense:
        return [spec]
    budgets = sorted({*parts.cfg.evaluation.budgets, spec.budget}, reverse=True)
    sparse = [CacheSpec(**{**parts.cfg.cache, "budget": budget}) for budget in budgets]
    return [CacheSpec.dense(), *sparse]


def evaluate_policy(parts: Parts, roles: Roles) -> tuple[list[EvalRow], Rollout]:
    """Accuracy on held-out prompts with each cache, and the rollout under the run's own budget."""
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
        rows_per_pass=parts.cfg.rollout.rows_per_pass,
        cuda_graph=parts.cfg.rollout.cuda_graph,
    )
    evaluator = Evaluator(roles, parts.tokenizer, parts.task, problems, config)
    caches = evaluation_caches(parts)
    rows, pictured = [], None
    with track("eval", len(caches)) as advance, parts.fabric.autocast():
        for cache in caches:
            row, rollout = evaluator.score_cache(cache)
            rows.append(row)
            advance(accuracy=row.accuracy)
            if cache == parts.cache or pictured is None:
                pictured = rollout
    assert pictured is not None
    return rows, pictured
