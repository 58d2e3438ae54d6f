"""Score a policy on held-out prompts, dense and at each budget of each policy."""

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from lit_rlkv.callbacks.progress import track
from lit_rlkv.data.evaluation import CacheScore, EvalConfig, Evaluator
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.faults import Interruption
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.ranks import ranks_of
from lit_rlkv.stages.parts import Parts
from lit_rlkv.types import EvalRow, Rollout


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
    parts: Parts,
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
    parts: Parts, roles: Roles, interruption: Interruption | None = None
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
